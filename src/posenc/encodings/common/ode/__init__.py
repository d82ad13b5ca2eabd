"""FLOATER's differential equation and its solvers."""
