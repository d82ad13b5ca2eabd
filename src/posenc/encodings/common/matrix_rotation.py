"""Rotations of more than two features at a time, as exponentials of learned matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, reduce
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Count, Positive, Width, checked
from posenc.encoding import Pairing, QueryKeyTransform, Rotation, apply_rotation
from posenc.encoding.rotation import Factors
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.common.frequencies import angles_at
from posenc.encodings.common.matrix_exponential import exponentials
from posenc.encodings.common.precision import wider
from posenc.encodings.common.rotation import cos_sin, kept_of_positions, repeat_keys, require_width
from posenc.encodings.common.special_tokens import zero_special
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import without_autocast

T = TypeVar("T")

ADJACENT: Pairing = "adjacent"


class MatrixRotary(QueryKeyTransform, ABC):
    """``q'_i = exp(Σ_a p_ia A_a) q_i`` and likewise keys, in blocks of b features.

    A subclass defines ``generators``, whose skew-symmetric parts are the matrices A; exponentials
    of skew-symmetric matrices are rotations, those of blocks of two by an angle.

    Args:
        heads: query heads H.
        head_dim: width D of a head.
        block: b, features per rotated block.
        span: divisor of positions; cells per side of the training images.

    Raises:
        ArgumentError: when ``heads`` is below 1, ``block`` is below 2 or does not divide
            ``head_dim``, or ``span`` is not above 0.
    """

    heads: int
    head_dim: int

    axes = (2,)

    @checked
    def __init__(self, *, heads: Count, head_dim: Width, block: Width, span: Positive) -> None:
        super().__init__()
        if block < 2 or head_dim < block or head_dim % block:
            raise ArgumentError(
                "block",
                expected=f"2 or more, a divisor of head_dim ({head_dim})",
                got=block,
                remedy="Use 2 for rotations of pairs.",
            )
        self.heads, self.head_dim, self.block, self.span = heads, head_dim, block, span

    @abstractmethod
    def generators(self, *, dtype: torch.dtype) -> Float[Tensor, "A H N b b"]:
        """Matrices whose skew-symmetric part G - Gᵀ generates the rotation of N = D/b blocks."""

    def rotations(self, layout: Layout) -> Float[Tensor, "b H L N b b"]:
        """The rotation of every token and block, in the positions' float32 or float64."""
        numbers = layout.positions[..., 0].numel() * self.heads * self.head_dim * self.block
        return kept_of_positions(self, layout, partial(self._exponentials, layout), numbers=numbers)

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        require_width(q, self.head_dim)
        k = repeat_keys(k, self.heads)
        # Not under autocast: bfloat16 exponents of a few turns are off by radians.
        with without_autocast(q.device):
            if self.block == 2:
                query, key = self._both(grid, self._factors)
                return apply_rotation(q, *query, ADJACENT), apply_rotation(k, *key, ADJACENT)
            turned, turned_key = self._both(grid, self.rotations)
            if turned is turned_key:
                q, k = _apply(turned, q, k)
                return q, k
            return _apply(turned, q)[0], _apply(turned_key, k)[0]

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        if self.block > 2 or k.shape[1] != self.heads:
            return None
        require_width(q, self.head_dim)
        with without_autocast(q.device):
            return Rotation(*self._both(grid, self._factors), ADJACENT)

    def rotation(self, layout: Layout) -> tuple[Tensor, Tensor, Pairing] | None:
        return None if self.block > 2 else (*self._factors(layout), ADJACENT)

    def _exponentials(self, layout: Layout) -> Float[Tensor, "b H L N b b"]:
        positions = zero_special(wider(layout.positions) / self.span, layout)
        generators = self.generators(dtype=positions.dtype)
        skew = generators - generators.mT
        return exponentials(positions, skew, dtype=layout.positions.dtype).contiguous()

    def _factors(self, layout: Layout) -> Factors:
        """Cosines and sines ``[b, H, L, N]`` of the angles of blocks of two."""
        numbers = layout.positions[..., 0].numel() * self.heads * self.head_dim
        return kept_of_positions(self, layout, partial(self._cos_sin, layout), numbers=numbers)

    def _cos_sin(self, layout: Layout) -> Factors:
        made = self.generators(dtype=wider(layout.positions).dtype)
        frequencies = ((made[..., 1, 0] - made[..., 0, 1]) / self.span).unsqueeze(2)
        positions = layout.positions[:, None, :, :, None]
        axes = [angles_at(positions[..., a, :], row) for a, row in enumerate(frequencies)]
        return cos_sin(zero_special(torch.stack(axes).sum(0), layout))

    @staticmethod
    def _both(grid: Grid, of: Callable[[Layout], T]) -> tuple[T, T]:
        query = of(grid.query)
        return query, query if grid.key is grid.query else of(grid.key)


def _apply(
    rotation: Float[Tensor, "b H L N b b"], *tokens: Float[Tensor, "B H L D"]
) -> list[Float[Tensor, "B H L D"]]:
    """Tokens of the same positions, in products that read each rotation once."""
    wide = reduce(torch.promote_types, [x.dtype for x in tokens], rotation.dtype)
    rotation = rotation.to(wide).mT
    blocks = [x.to(wide).reshape(*x.shape[:3], *rotation.shape[3:5]) for x in tokens]
    if len(rotation) > 1:
        turned = (torch.stack(blocks, dim=4) @ rotation).unbind(4)
    else:  # all batch rows beside each other
        rows = torch.stack([x.movedim(0, 3) for x in blocks], dim=3)
        products = (rows.flatten(3, 4) @ rotation[0]).view(rows.shape)
        turned = products.movedim(4, 0).unbind(4)
    return [rotated.flatten(3).to(x.dtype) for rotated, x in zip(turned, tokens, strict=True)]
