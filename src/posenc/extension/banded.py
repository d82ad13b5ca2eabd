"""RoPE with different positions for near and far pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.encoding import ScoreTerm
from posenc.encodings.common.frequencies import angles_at
from posenc.encodings.common.precision import wider
from posenc.encodings.common.rotation import require_width, rotate
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.query_key.rope import Rope
from posenc.grid import Grid
from posenc.layout import Layout


@dataclass(frozen=True, eq=False)
class RotationBand:
    """Pairs of queries and keys that are rotated by positions other than their own.

    Args:
        query: ``[b, Q]`` positions of queries for these pairs.
        key: ``[b, K]`` positions of keys.
        pairs: ``[b, Q, K]`` mask; None: all pairs in no other band.
    """

    query: Float[Tensor, "b Q"]
    key: Float[Tensor, "b K"]
    pairs: Bool[Tensor, "b Q K"] | None = None


class BandedRope(ScoreTerm, ABC):
    """``s_ij = scale · ⟨R(a_b(p_i)) q_i, R(c_b(p_j)) k_j⟩``, where b is the band of the pair i, j.

    Subclasses define ``bands``. Keys are cached untransformed and rotated for each band by their
    layout.

    Args:
        rope: as trained.
    """

    replaces_product: ClassVar[bool] = True

    def __init__(self, *, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = rope.head_dim

    @abstractmethod
    def bands(self, grid: Grid) -> Sequence[RotationBand]:
        """The bands; the first holds all pairs in no other."""

    def forward(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B H K D"], grid: Grid, *, scale: float
    ) -> Float[Tensor, "B H Q K"]:
        require_width(q, self.rope.head_dim)
        rest, *others = self.bands(grid)
        logits = self._product(q * scale, k, grid, rest)
        for band in others:
            assert band.pairs is not None  # only the first lacks a mask
            product = self._product(q * scale, k, grid, band)
            logits = torch.where(band.pairs.unsqueeze(1), product, logits)
        return logits

    def _product(
        self, q: Tensor, k: Tensor, grid: Grid, band: RotationBand
    ) -> Float[Tensor, "B H Q K"]:
        rotated = self._rotate(q, band.query, grid.query)
        return rotated @ self._rotate(k, band.key, grid.key).mT

    def _rotate(self, x: Tensor, positions: Float[Tensor, "b L"], layout: Layout) -> Tensor:
        angles = angles_at(positions.unsqueeze(-1), self.rope.frequencies(like=wider(positions)))
        angles = zero_special(angles, layout)
        return rotate(x, angles, self.rope.pairing, gain=self.rope.gain)


def within(grid: Grid, window: float) -> Bool[Tensor, "b Q K"]:
    """Pairs fewer than ``window`` tokens apart."""
    return grid.offset[..., 0].abs() < window
