"""Calls of the public API and values that they must refuse."""
