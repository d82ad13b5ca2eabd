"""RoPE with frequencies that depend on the length of the text, by row or document."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from posenc.encoding import QueryKeyTransform, Rotation
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.common.precision import angles_at, wider
from posenc.encodings.common.rotation import cos_sin
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.query_key.rope import Rope
from posenc.grid import Grid, seen_lengths
from posenc.layout import Layout


class VaryingRope(QueryKeyTransform, ABC):
    """RoPE with frequencies divided depending on the length n of the input.

    n is the largest key position + 1 of the row or document in each call: all keys, cached ones
    too, are rotated for it. Rows do not affect one another. Under token-by-token decoding the past
    is rotated for a new n in each step, in one pass for the last n.

    Subclasses define ``divisors``.

    Args:
        rope: as trained.
        length: the trained length L.
        gain: factor of rotated features.
    """

    tokenwise = False
    pairwise = False

    rope: Rope
    length: float
    gain: float = 1.0

    def __post_init__(self) -> None:
        self.head_dim = self.rope.head_dim

    @abstractmethod
    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        """Divisors of each pair's frequency at these lengths."""

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        return self._rotation(q, grid).apply(q, k)

    def logit_factor(self, grid: Grid) -> float:
        return self.gain**2

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        return self._rotation(q, grid)

    def _rotation(self, q: Queries, grid: Grid) -> Rotation:
        sides = zip((grid.query, grid.key), seen_lengths(grid), strict=True)
        query, key = (cos_sin(self._angles(*side), gain=self.gain) for side in sides)
        return Rotation(query, key, self.rope.pairing)

    def _angles(self, layout: Layout, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b L T"]:
        positions = layout.positions[..., :1]
        speeds = self.rope.frequencies(like=wider(positions)) / self.divisors(lengths)
        return zero_special(angles_at(positions, speeds), layout)
