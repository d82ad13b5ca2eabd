"""RoPE with different positions for near and far pairs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.encoding import RotatedBand, ScoreTerm, apply_rotation
from posenc.encoding.rotation import Factors
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.precision import angles_at, wider
from posenc.encodings.common.rotation import cos_sin
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.query_key.rope import Rope
from posenc.grid import FARTHEST, Grid
from posenc.layout import Layout


class Moved(NamedTuple):
    """Positions by which the pairs of a band are rotated.

    Args:
        query: ``[b, Q]``, or ``[b, 1]`` for one position of all.
        key: ``[b, K]``; None: 0 for all.
    """

    query: Float[Tensor, "b Q"]
    key: Float[Tensor, "b K"] | None = None


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


class BandedRope(ScoreTerm, ABC):
    """``s_ij = scale · ⟨R(a_b(p_i)) q_i, R(c_b(p_j)) k_j⟩``, where b is the band of the pair i, j.

    Keys are cached untransformed and rotated for each band by their layout.

    Args:
        rope: as trained.
    """

    replaces_product = True

    rope: Rope

    def __post_init__(self) -> None:
        self.head_dim = self.rope.head_dim

    @abstractmethod
    def moved(self, grid: Grid) -> Sequence[Moved]:
        """Positions for each band, in ascending order of offsets."""

    @abstractmethod
    def band_of(self, grid: Grid) -> Int[Tensor, "b Q K"]:
        """Index of each pair's band; pairs beyond the last are rotated as those of the first."""

    @abstractmethod
    def edges(self, grid: Grid) -> Sequence[int | Int[Tensor, "b Q"]] | None:
        """Least offset of each band but the first, of all queries or each; None if not whole."""

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        index, pairing = self.band_of(grid).unsqueeze(1), self.rope.pairing
        products = []
        for moved in self.moved(grid):
            query, key = self._factors(moved, grid)
            rotated = k if key is None else apply_rotation(k, *key, pairing)
            products.append(apply_rotation(q * scale, *query, pairing) @ rotated.mT)
        logits = products[0]
        for band, product in enumerate(products[1:], 1):
            logits = torch.where(index == band, product, logits)
        return logits

    def bands(self, grid: Grid) -> Sequence[RotatedBand] | None:
        moved, edges = self.moved(grid), self.edges(grid)
        if edges is None:
            return None
        ends = [-FARTHEST, *edges[: len(moved) - 1], FARTHEST]
        bands = []
        for positions, first, end in zip(moved, ends, ends[1:], strict=False):
            (lowest, highest), banded_grid = grid.band, grid
            if isinstance(first, int) and isinstance(end, int):
                lowest, highest = max(lowest, first), min(highest, end - 1)
            else:
                order = grid.query.order
                banded_grid = grid.within(torch.stack([order + first, order + end], dim=-1))
            if lowest <= highest:
                factors, window = self._factors(positions, grid), (lowest, highest)
                bands.append(
                    RotatedBand(*factors, self.rope.pairing, window, banded_grid.intervals)
                )
        return bands

    def of_last(self, grid: Grid, begin: int) -> tuple[list[Factors], list[BandOfQuery]]:
        """Rotations of the keys from ``begin`` on, and the bands of a grid of one query."""
        moved = self.moved(grid)
        index = self.band_of(grid)  # [b, 1, K]
        index = index.masked_fill(index >= len(moved), 0)
        new = grid.key.slice(begin, grid.key.length)
        rotations: dict[int, tuple[int, Factors]] = {}
        bands = []
        for band, (query, key) in enumerate(moved):
            pairs = index == band
            visible = pairs.any(1).any(0).nonzero()
            if key is not None and id(key) not in rotations:
                turned = self._turned(key[:, begin:], new, self.rope.gain)
                rotations[id(key)] = len(rotations), turned
            if len(visible):
                keys = slice(int(visible[0]), int(visible[-1]) + 1)
                inside = pairs[:, None, :, keys]
                number = None if key is None else rotations[id(key)][0]
                gain = self.rope.gain ** (2 if key is None else 1)
                factors = self._turned(query, grid.query, gain)
                some = None if bool(inside.all()) else inside
                bands.append(BandOfQuery(factors, number, keys, some))
        return [turned for _, turned in rotations.values()], bands

    def _factors(self, moved: Moved, grid: Grid) -> tuple[Factors, Factors | None]:
        """Cosines and sines of queries and keys; the gain of keys at 0 is in the queries'."""
        gain = self.rope.gain
        if moved.key is None:
            return self._turned(moved.query, grid.query, gain * gain), None
        key = self._turned(moved.key, grid.key, gain)
        return self._turned(moved.query, grid.query, gain), key

    def _turned(self, positions: Float[Tensor, "b L"], layout: Layout, gain: float) -> Factors:
        angles = angles_at(positions.unsqueeze(-1), self.rope.frequencies(like=wider(positions)))
        return cos_sin(zero_special(angles, layout), gain=gain)


class WindowedRope(BandedRope):
    """``BandedRope`` of pairs fewer than ``window`` tokens apart, those behind and those ahead.

    ``moved`` returns them in the order behind, near, ahead; the last are left out if causal.
    """

    window: float

    def band_of(self, grid: Grid) -> Int[Tensor, "b Q K"]:
        offset = grid.offset[..., 0]
        return (offset > -self.window).long() + (offset >= self.window)

    def edges(self, grid: Grid) -> Sequence[int | Int[Tensor, "b Q"]] | None:
        window = math.ceil(self.window)
        return 1 - window, window
