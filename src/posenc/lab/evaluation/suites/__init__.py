"""Measurements of a model, one kind of model a file."""
