"""The visible band of pairs, and the table entries that they read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["FAR", "Band"]

FAR = 2**30
"""More than the distance of any two tokens."""


@dataclass(frozen=True)
class Band:
    """Pair (i, j) lies on diagonal ``t = j - i + origin`` and reads entry ``clip(t, 0, count-1)``.

    Args:
        origin: see new_max.
        first, last: smallest and largest visible diagonal.
        count: entries.
        lowest: offset of entry 0.
    """

    origin: int
    first: int
    last: int
    count: int
    lowest: int

    @classmethod
    def anywhere(cls) -> Band:
        """For pairs that read no entry and whose visibility is given token by token."""
        return cls(0, -FAR, FAR, 1, 0)

    @classmethod
    def of(
        cls,
        queries: int,
        keys: int,
        shift: int,
        *,
        causal: bool,
        window: int | None,
        max_distance: int | None,
    ) -> Band:
        """For tokens one position apart on both sides.

        Args:
            shift: position of the first key less that of the first query.
            causal, window: as a grid's; False and None where it is given token by token.
            max_distance: offsets beyond it read what it reads; None: each offset its own.
        """
        smallest, largest = shift - (queries - 1), shift + keys - 1
        first, last = smallest, largest
        if causal:
            last = min(last, 0)
        if window is not None:
            first, last = max(first, 1 - window), min(last, window - 1)
        # Where no pair is visible, an empty range beside the offsets: kernels count in 32 bits.
        last = max(last, smallest - 1)
        first = min(first, last + 1)
        far = max(abs(smallest), abs(largest)) if max_distance is None else max_distance
        # What is read lies within the grid's own offsets, whatever is visible.
        lowest = max(min(max(first, -far), last), smallest)
        highest = min(max(min(last, far), lowest), largest)
        lowest = min(lowest, highest)
        return cls(shift - lowest, first - lowest, last - lowest, highest - lowest + 1, lowest)

    @property
    def nearest(self) -> int:
        """The entry of offset 0, or the nearest to it."""
        return min(max(0, -self.lowest), self.count - 1)

    def distances(self, device: torch.device) -> Tensor:
        """Distances that the entries are of, ``[count]``, as real numbers."""
        return self.offsets().float_offsets(device=device).abs()

    def offsets(self) -> Grid:
        """A grid whose offsets are those of the entries."""
        return Grid(Layout.sequence(1), Layout.sequence(self.count, start=self.lowest))
