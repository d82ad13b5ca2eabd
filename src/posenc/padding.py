"""Padding may hold anything: where token vectors enter, those of invalid tokens become zeros."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["zero_invalid", "zero_invalid_signals"]


def zero_invalid(x: Tensor, layout: Layout, *, dim: int = 1) -> Tensor:
    """``x`` with zeros, and gradients of zero, at the tokens that ``layout`` marks invalid.

    Values are replaced, not multiplied, so that NaN and infinities are gone too. Where the layout
    has no ``valid`` it is ``x`` itself, at no cost.

    Args:
        x: ``[B, …, L, …]``, tokens along ``dim``.
        layout: of those tokens, with ``B`` rows or one.
    """
    if layout.valid is None:
        return x
    valid = layout.valid
    shape = [valid.shape[0], *(1 for _ in x.shape[1:])]
    shape[dim] = valid.shape[1]
    return x.masked_fill(~valid.view(shape), 0)


def zero_invalid_signals(grid: Grid) -> Grid:
    """The grid with zeros for the signals of invalid tokens; ``grid`` itself where it has none."""
    query, key = _zero_signal(grid.query), _zero_signal(grid.key)
    if query is grid.query and key is grid.key:
        return grid
    if grid.query is grid.key:
        key = query
    return replace(grid, query=query, key=key)


def _zero_signal(layout: Layout) -> Layout:
    if layout.signal is None or layout.valid is None:
        return layout
    return replace(layout, signal=zero_invalid(layout.signal, layout))
