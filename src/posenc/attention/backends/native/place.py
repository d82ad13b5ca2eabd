"""Offsets of the pairs of a grid, counted so that 32 bits hold them wherever the tokens are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.attention.backends.common.base import Unsupported
from posenc.attention.runs import run_intervals
from posenc.attention.spacing import nearest_origin
from posenc.grid import Grid

MOST = 2**16
"""Offsets between the tokens of documents that are always tabulated; more if there are as many
tokens."""


@dataclass(frozen=True, eq=False)
class Place:
    """The offsets of a problem's pairs.

    Args:
        domain: smallest and largest offset of a visible pair; any, where there is none.
        reach: smallest and largest offset of any pair.
        shift: first key position less first query position of a regular grid; 0 for others.
        band: smallest and largest offset that a regular grid shows; nothing where the first is
            larger. Not read for others.
        intervals: of other grids, see ``run_intervals``.
    """

    domain: tuple[int, int]
    reach: tuple[int, int]
    shift: int = 0
    band: tuple[int, int] = (0, 0)
    intervals: Int[Tensor, "3 b Q"] | None = None

    @classmethod
    def of(cls, grid: Grid) -> Place | Unsupported:
        """The place of a grid, or the reason why it has none."""
        if grid.shift is not None and not grid.segmented:
            return cls.regular(grid)
        if torch.compiler.is_compiling():
            return Unsupported("inside a compiled graph it takes regular layouts only")
        intervals = run_intervals(grid)
        if intervals is None:
            return Unsupported("its tokens are not whole stretches of consecutive positions")
        place = cls.of_intervals(intervals, grid.key.length)
        width = place.reach[1] - place.reach[0]
        if width >= max(MOST, 4 * (grid.query.length + grid.key.length)):
            return Unsupported("its documents are too far apart for tables of their offsets")
        return place

    @classmethod
    def regular(cls, grid: Grid) -> Place:
        """The place of a regular grid."""
        shift = grid.require_shift()
        reach = shift - grid.query.length + 1, shift + grid.key.length - 1
        first, last = reach
        if grid.window is not None:
            first, last = max(first, 1 - grid.window), min(last, grid.window - 1)
        if grid.causal:
            last = min(last, 0)
        domain = (first, last) if first <= last else (shift, shift)
        return cls(domain, reach, shift, (first, last))

    @classmethod
    def of_intervals(cls, intervals: Int[Tensor, "3 b Q"], keys: int) -> Place:
        """The place of a grid whose intervals are known."""
        low, high, base = intervals
        reach = int(base.min()), int(base.max()) + keys - 1
        seen = low < high
        if not bool(seen.any()):
            return cls((reach[0], reach[0]), reach, intervals=intervals)
        domain = int((low + base)[seen].min()), int((high - 1 + base)[seen].max())
        return cls(domain, reach, intervals=intervals)

    @property
    def origin(self) -> int:
        """The offset that the kernels, whose offsets have 32 bits, count from."""
        return nearest_origin(*self.reach)

    def numbers(self) -> list[int]:
        """Shift and band of a regular grid, counted from the origin."""
        return [x - self.origin for x in (self.shift, *self.band)]

    def counted_intervals(self) -> Int[Tensor, "3 b Q"] | None:
        """The intervals with offsets counted from the origin, as int32."""
        if self.intervals is None:
            return None
        low, high, base = self.intervals
        return torch.stack([low, high, base - self.origin]).to(torch.int32)
