"""Checks of arguments that several methods make."""

from __future__ import annotations

from posenc.errors import ArgumentError
from posenc.layout import Layout


def require_even(name: str, value: int, *, remedy: str) -> None:
    """ArgumentError unless ``value`` is an even number, 2 or more."""
    if value < 2 or value % 2:
        raise ArgumentError(name, expected="an even number, 2 or more", got=value, remedy=remedy)


def require_axes(layout: Layout, axes: int, *, remedy: str) -> None:
    """ArgumentError unless the layout's positions have ``axes`` axes."""
    if layout.axes != axes:
        raise ArgumentError("layout", expected=f"{axes} axes", got=layout.axes, remedy=remedy)
