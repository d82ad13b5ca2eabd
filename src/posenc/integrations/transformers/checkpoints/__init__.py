"""Checkpoint folders of transformers."""
