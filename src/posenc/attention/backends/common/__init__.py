"""The interface of backends, and attention by its definition."""
