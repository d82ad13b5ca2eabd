"""Positions of tokens as data."""

from posenc.layout.layout import Layout

__all__ = ["Layout"]
