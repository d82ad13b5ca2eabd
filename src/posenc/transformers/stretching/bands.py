"""The bands of a ``BandedRope`` for one query, whose keys are rotated once for all calls."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool
from torch import Tensor

from posenc.encoding.rotation import Factors
from posenc.extension.banded import BandedRope
from posenc.grid import Grid


class BandOfQuery(NamedTuple):
    """The keys of a band of one query.

    Args:
        query: cosines and sines of the query.
        rotation: number of that of the keys; None: none.
        keys: range that holds the band.
        pairs: ``[b, 1, 1, K]``, those of the range that are in it; None: all.
    """

    query: Factors
    rotation: int | None
    keys: slice
    pairs: Bool[Tensor, "b 1 1 K"] | None


def bands_of_query(
    score: BandedRope, grid: Grid, begin: int
) -> tuple[list[Factors], list[BandOfQuery]]:
    """Rotations of the keys from ``begin`` on, and the bands of a grid of one query."""
    moved, gain = score.moved(grid), score.rope.gain
    index = score.band_of(grid)  # [b, 1, K]
    index = index.masked_fill(index >= len(moved), 0)
    new = grid.key.slice(begin, grid.key.length)
    rotations: dict[int, tuple[int, Factors]] = {}
    bands = []
    for band, (query, key) in enumerate(moved):
        pairs = index == band
        visible = pairs.any(1).any(0).nonzero()
        if key is not None and id(key) not in rotations:
            rotated = score.rotation(key[:, begin:], new, gain)
            rotations[id(key)] = len(rotations), rotated
        if len(visible):
            keys = slice(int(visible[0]), int(visible[-1]) + 1)
            inside = pairs[:, None, :, keys]
            number = None if key is None else rotations[id(key)][0]
            factors = score.rotation(query, grid.query, gain ** (2 if key is None else 1))
            some = None if bool(inside.all()) else inside
            bands.append(BandOfQuery(factors, number, keys, some))
    return [rotated for _, rotated in rotations.values()], bands
