"""Methods that transform queries and keys."""
