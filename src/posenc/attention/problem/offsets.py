"""Offsets of the pairs of a grid, relative to an origin so that 32 bits hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.attention.problem.intervals import run_intervals
from posenc.attention.problem.record import Geometry
from posenc.attention.problem.spacing import nearest_origin
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid

MOST = 2**16
"""Offsets between the tokens of documents that are always tabulated; more if there are as many
tokens."""


@dataclass(frozen=True, eq=False)
class Offsets:
    """Offsets of the pairs of a grid.

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
    def of(cls, grid: Grid) -> Offsets | str:
        """Offsets of a grid whose documents are contiguous, or the reason why it has none.

        Reads the values of layouts with documents or padding.
        """
        if grid.shift is not None and not grid.segmented:
            return cls.regular(grid)
        if torch.compiler.is_compiling():
            marks = (x for side in (grid.query, grid.key) for x in (side.document, side.valid))
            if grid.shift is None or any(mark is not None for mark in marks):
                return "inside a compiled graph it takes regular layouts only"
            return cls._in_intervals(grid)
        return reused_of_grid(cls._of_documents, "offsets", grid=grid)

    @classmethod
    def _in_intervals(cls, grid: Grid) -> Offsets:
        """Offsets of a regular grid with intervals, whose values are not read."""
        assert grid.intervals is not None
        assert grid.key.start is not None
        regular, (lowest, highest) = cls.regular(grid), grid.band
        base = grid.require_shift() - torch.arange(grid.query.length, device=grid.query.device)
        first, end = (grid.intervals - grid.key.start).unbind(-1)
        low, high = (lowest - base).maximum(first), (highest + 1 - base).minimum(end)
        ends = (x.clamp(0, grid.key.length) for x in (low, high))
        intervals = torch.stack([*ends, base.expand_as(low)])
        return replace(regular, shift=0, band=(0, 0), intervals=intervals)

    @classmethod
    def _of_documents(cls, grid: Grid) -> Offsets | str:
        intervals = run_intervals(grid)
        if intervals is None:
            return "its tokens are not whole stretches of consecutive positions"
        offsets = cls.of_intervals(intervals, grid.key.length)
        width = offsets.reach[1] - offsets.reach[0]
        if width >= max(MOST, 4 * (grid.query.length + grid.key.length)):
            return "its documents are too far apart for tables of their offsets"
        return offsets

    @classmethod
    def regular(cls, grid: Grid) -> Offsets:
        """Offsets of a regular grid."""
        return cls.shifted(grid, grid.require_shift())

    @classmethod
    def shifted(cls, grid: Grid, shift: int, *, masked: bool = True) -> Offsets:
        """Offsets of a grid whose visible pairs have the offset ``j - i + shift``.

        Args:
            masked: True if causality and the window mask pairs by their offset."""
        reach = shift - grid.query.length + 1, shift + grid.key.length - 1
        first, last = reach
        if masked:  # no farther than a step beyond the pairs, as kernels' numbers have 32 bits
            first = min(max(first, grid.band[0]), reach[1] + 1)
            last = max(min(last, grid.band[1]), reach[0] - 1)
        domain = (first, last) if first <= last else (shift, shift)
        return cls(domain, reach, shift, (first, last))

    @classmethod
    def of_intervals(cls, intervals: Int[Tensor, "3 b Q"], keys: int) -> Offsets:
        """Offsets of a grid with given intervals of visible keys."""
        low, high, base = intervals
        reach = int(base.min()), int(base.max()) + keys - 1
        sees_any = low < high
        if not bool(sees_any.any()):
            return cls((reach[0], reach[0]), reach, intervals=intervals)
        domain = int((low + base)[sees_any].min()), int((high - 1 + base)[sees_any].max())
        return cls(domain, reach, intervals=intervals)

    def shown_keys(self, queries: int, keys: int) -> tuple[int, int]:
        """Indices of keys from the first that a query sees up to the last plus one."""
        if self.intervals is None:
            (lowest, highest), shift = self.band, self.shift
            return max(0, lowest - shift), min(keys, highest - shift + queries)
        low, high, _ = self.intervals
        sees_any = low < high
        return (
            (int(low[sees_any].min()), int(high[sees_any].max()))
            if bool(sees_any.any())
            else (0, 0)
        )

    @property
    def shows_offset_zero(self) -> bool:
        """True if each query that sees any key sees the key of offset 0."""
        if self.intervals is None:
            first, last = self.band
            return first <= 0 <= last
        low, high, base = self.intervals
        return bool(((low >= high) | ((low + base <= 0) & (high + base > 0))).all())

    def of_keys(self, queries: int, begin: int, end: int) -> Offsets:
        """Offsets of the keys ``begin`` to ``end`` (exclusive), which include all visible ones."""
        if self.intervals is not None:
            low, high, base = self.intervals
            ends = (low - begin).clamp(min=0), (high - begin).clamp(min=0)
            return Offsets.of_intervals(torch.stack([*ends, base + begin]), end - begin)
        shift = self.shift + begin
        reach = shift - queries + 1, shift + end - begin - 1
        return replace(self, reach=reach, shift=shift)

    @property
    def origin(self) -> int:
        """Origin of the kernels' 32-bit offsets."""
        return nearest_origin(*self.reach)

    def entries(self, max_distance: int | None) -> tuple[int, int]:
        """The smallest and largest offset of a regular grid that terms are read at.

        Visible offsets beyond them read what these read, and so may hidden ones.

        Args:
            max_distance: no term changes beyond it; None: not known.
        """
        (smallest, largest), (first, last) = self.reach, self.band
        last = max(last, smallest - 1)  # where no pair is visible, beside the offsets
        first = min(first, last + 1)
        far = max(abs(smallest), abs(largest)) if max_distance is None else max_distance
        lowest = max(min(max(first, -far), last), smallest)
        highest = min(max(min(last, far), lowest), largest)
        return min(lowest, highest), highest

    def geometry(self) -> Geometry:
        """The record for kernels, with offsets counted from the origin."""
        origin, intervals = self.origin, self.intervals
        if intervals is not None:
            low, high, base = intervals
            intervals = torch.stack([low, high, base - origin]).to(torch.int32)
        lowest, highest = self.band
        return Geometry(self.shift - origin, lowest - origin, highest - origin, intervals=intervals)
