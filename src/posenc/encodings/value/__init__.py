"""Methods that transform values and outputs."""
