"""Ways to compute attention."""
