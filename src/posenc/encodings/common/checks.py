"""Checks of arguments that several methods make."""

from __future__ import annotations

from posenc.errors import ArgumentError
from posenc.layout import Layout


def require_axes(layout: Layout, axes: int, *, remedy: str) -> None:
    """ArgumentError unless the layout's positions have ``axes`` axes."""
    if layout.axes != axes:
        raise ArgumentError("layout", expected=f"{axes} axes", got=layout.axes, remedy=remedy)
