"""Training loop, its checkpoints, and the machine it runs on."""
