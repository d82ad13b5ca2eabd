"""RoPE with different positions for near and far pairs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
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

    def _factors(self, moved: Moved, grid: Grid) -> tuple[Factors, Factors | None]:
        """Cosines and sines of queries and keys; the gain of keys at 0 is in the queries'."""
        gain = self.rope.gain
        if moved.key is None:
            return self.rotation(moved.query, grid.query, gain * gain), None
        key = self.rotation(moved.key, grid.key, gain)
        return self.rotation(moved.query, grid.query, gain), key

    def rotation(self, positions: Float[Tensor, "b L"], layout: Layout, gain: float) -> Factors:
        """Cosines and sines, times ``gain``, of tokens at other positions than their layout's."""
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
