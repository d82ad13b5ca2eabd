"""Measurements of trained models, as they are or extended to longer contexts."""
