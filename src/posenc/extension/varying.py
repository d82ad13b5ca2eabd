"""RoPE with frequencies that depend on the length of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from posenc.encoding import QueryKeyTransform, Rotation
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.common.frequencies import angles_at
from posenc.encodings.common.precision import wider
from posenc.encodings.common.rotation import cos_sin, require_width
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.query_key.rope import Rope
from posenc.extension.lengths import seen_lengths
from posenc.grid import Grid
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

    def __init__(self, *, rope: Rope, length: float, gain: float = 1.0) -> None:
        super().__init__()
        self.rope, self.length, self.gain = rope, length, gain
        self.head_dim = rope.head_dim

    @abstractmethod
    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        """Divisors of each pair's frequency at these lengths."""

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        return self._rotation(q, grid).apply(q, k)

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        return self._rotation(q, grid)

    def _rotation(self, q: Queries, grid: Grid) -> Rotation:
        require_width(q, self.rope.head_dim)
        sides = zip((grid.query, grid.key), seen_lengths(grid), strict=True)
        query, key = (cos_sin(self._angles(*side), gain=self.gain) for side in sides)
        return Rotation(query, key, self.rope.pairing)

    def _angles(self, layout: Layout, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b L T"]:
        positions = layout.positions[..., :1]
        speeds = self.rope.frequencies(like=wider(positions)) / self.divisors(lengths)
        return zero_special(angles_at(positions, speeds), layout)
