"""The visible band of a regular grid, and its key ranges for a block of queries.

Queries are counted from the last, ``r = Q - 1 - i``, so that ``c = r + j`` is the place of a pair's
offset among all offsets, and a tile of any quantity that depends on the offset alone is a Hankel
matrix: a view of a vector with both strides 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posenc.grid import Grid

Kind = Literal["near", "behind", "ahead"]

LEAST = 64
"""Fewest keys of a key range of its own kind."""


@dataclass(frozen=True)
class KeyRange:
    """Keys ``begin`` to ``end`` (exclusive) for one block of queries.

    ``kind`` is ``"behind"`` or ``"ahead"`` where every pair is visible and in the outermost bucket
    of that side, ``"near"`` otherwise.
    """

    begin: int
    end: int
    kind: Kind


@dataclass(frozen=True)
class Band:
    """The visible pairs of a regular grid, as a range of places ``c = r + j``.

    Args:
        queries, keys: Q and K.
        zero: the place of offset 0.
        first, last: smallest and largest place that is visible, inclusive.
        behind: places up to here read the outermost bucket behind; ahead: from here on, ahead.
            None: there is no such bucket.
    """

    queries: int
    keys: int
    zero: int
    first: int
    last: int
    behind: int | None = None
    ahead: int | None = None

    @classmethod
    def of(cls, grid: Grid, max_distance: int | None) -> Band:
        """The band of a regular grid, whose outermost buckets begin at ``max_distance``.

        Raises:
            ArgumentError: where the grid is not regular.
        """
        return cls.regular(
            grid.query.length,
            grid.key.length,
            shift=grid.require_shift(),
            causal=grid.causal,
            window=grid.window,
            max_distance=max_distance,
        )

    @classmethod
    def regular(
        cls,
        queries: int,
        keys: int,
        *,
        shift: int,
        causal: bool,
        window: int | None,
        max_distance: int | None,
    ) -> Band:
        """The same from numbers; ``shift`` is the first key's position less the first query's."""
        zero = queries - 1 - shift
        far = queries + keys + abs(zero) if window is None else window
        first = max(0, zero - (far - 1))
        last = min(queries + keys - 2, zero if causal else zero + far - 1)
        behind, ahead = (
            (None, None) if max_distance is None else (zero - max_distance, zero + max_distance)
        )
        return cls(queries, keys, zero, first, last, behind, ahead)

    @property
    def whole(self) -> bool:
        """True if every query sees every key."""
        return self.first <= 0 and self.last >= self.queries + self.keys - 2

    def blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """Ranges of queries, counted from the last one."""
        for begin in range(0, self.queries, size):
            yield begin, min(begin + size, self.queries)

    def seen(self, begin: int, end: int) -> tuple[int, int]:
        """Keys that any of these queries sees: from, to (exclusive; empty where not less)."""
        return max(0, self.first - (end - 1)), min(self.keys, self.last - begin + 1)

    def clear(self, begin: int, end: int, low: int, high: int) -> bool:
        """True if each of these queries sees each of these keys."""
        return begin + low >= self.first and end - 1 + high - 1 <= self.last

    def key_ranges(self, begin: int, end: int) -> list[KeyRange]:
        """Key ranges that these queries see, in order of the keys."""
        low, high = self.seen(begin, end)
        first, last = max(low, self.first - begin), min(high, self.last - (end - 1) + 1)
        behind, ahead = last, first
        if self.behind is not None:
            behind = min(last, self.behind - (end - 1) + 1)
        if self.ahead is not None:
            ahead = max(first, self.ahead - begin)
        found, at = [], low
        if self.behind is not None and first + LEAST <= behind:
            if first > at:
                found.append(KeyRange(at, first, "near"))
            found.append(KeyRange(first, behind, "behind"))
            at = behind
        if self.ahead is not None and max(ahead, at) + LEAST <= last:
            if max(ahead, at) > at:
                found.append(KeyRange(at, ahead, "near"))
            found.append(KeyRange(max(ahead, at), last, "ahead"))
            at = last
        if at < high:
            found.append(KeyRange(at, high, "near"))
        return found
