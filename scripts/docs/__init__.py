"""Pages of docs/ that follow from the code."""
