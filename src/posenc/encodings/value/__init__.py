"""Methods that add to the weighted sum of values."""
