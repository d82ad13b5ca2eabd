"""Checkpoint folders of transformers, read and written without that library."""

from posenc.integrations.transformers.checkpoint import FAMILIES, load, save

__all__ = ["FAMILIES", "load", "save"]
