"""Rotations of more than two features at a time, as exponentials of learned matrices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from posenc.arguments import Count, Positive, Width
from posenc.encoding import Pairing, QueryKeyTransform, Rotation, apply_rotation
from posenc.encoding.rotation import Factors
from posenc.encoding.tensors import Keys, Queries, repeat_heads
from posenc.encodings.common.precision import angles_at, wider
from posenc.encodings.common.rotation import both_sides, cos_sin, kept_of_positions
from posenc.encodings.common.special_tokens import zero_special
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_transformed, needs_dispatch, without_autocast

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

    axes = (2,)

    heads: Count
    head_dim: Width
    block: Width
    span: Positive = 14.0

    def __post_init__(self) -> None:
        if self.block < 2 or self.head_dim % self.block:
            raise ArgumentError(
                "block",
                expected=f"2 or more, a divisor of head_dim ({self.head_dim})",
                got=self.block,
                remedy="Use 2 for rotations of pairs.",
            )

    @abstractmethod
    def generators(self, *, dtype: torch.dtype) -> Float[Tensor, "A H N b b"]:
        """Matrices whose skew-symmetric part G - Gᵀ generates the rotation of N = D/b blocks."""

    def rotations(self, layout: Layout) -> Float[Tensor, "b H L N b b"]:
        """The rotation of every token and block, in the positions' float32 or float64."""
        return kept_of_positions(self, layout, self._exponentials)

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        k = repeat_heads(k, self.heads)
        # Not under autocast: bfloat16 exponents of a few turns are off by radians.
        with without_autocast(q.device):
            if self.block == 2:
                query, key = both_sides(grid, self._factors)
                return apply_rotation(q, *query, ADJACENT), apply_rotation(k, *key, ADJACENT)
            turned, turned_key = both_sides(grid, self.rotations)
            if turned is turned_key:
                q, k = _apply(turned, q, k)
                return q, k
            return _apply(turned, q)[0], _apply(turned_key, k)[0]

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        if self.block > 2 or k.shape[1] != self.heads:
            return None
        with without_autocast(q.device):
            return Rotation(*both_sides(grid, self._factors), ADJACENT)

    def _exponentials(self, layout: Layout) -> Float[Tensor, "b H L N b b"]:
        positions = zero_special(wider(layout.positions) / self.span, layout)
        generators = self.generators(dtype=positions.dtype)
        skew = generators - generators.mT
        return exponentials(positions, skew, dtype=layout.positions.dtype).contiguous()

    def _factors(self, layout: Layout) -> Factors:
        """Cosines and sines ``[b, H, L, N]`` of the angles of blocks of two."""
        return kept_of_positions(self, layout, self._cos_sin)

    def _cos_sin(self, layout: Layout) -> Factors:
        made = self.generators(dtype=wider(layout.positions).dtype)
        frequencies = ((made[..., 1, 0] - made[..., 0, 1]) / self.span).unsqueeze(2)
        positions = layout.positions[:, None, :, :, None]
        axes = [angles_at(positions[..., a, :], row) for a, row in enumerate(frequencies)]
        return cos_sin(zero_special(torch.stack(axes).sum(0), layout))


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


DEGREE = 16
"""Degree of the Taylor polynomial."""

MOST_RADIANS = 0.8
"""Norm up to which the polynomial is exact to 2^-53: ``norm^16 / 17!`` is less."""

FEWEST, FEWEST_MATRICES = 64, 1024
"""Positions and matrices below which ``torch.matrix_exp`` is as fast."""

CHUNK = 2**18
"""Numbers of matrices that are squared at a time, to stay in a core's cache."""


def exponentials(
    positions: Float[Tensor, "b L 2"], skew: Float[Tensor, "2 H N B B"], *, dtype: torch.dtype
) -> Float[Tensor, "b H L N B B"]:
    """``exp(p_0 A_0 + p_1 A_1)`` of every position p, head and block, as ``dtype``.

    By scaling and squaring: ``exp(X) = exp(X / 2^s)^(2^s)``. The Taylor polynomial of a scaled
    exponent is one product of the position's monomials ``p_0^i p_1^j / 2^(s(i+j))`` with matrices
    that all positions share, ``S_ij = (A_0 S_(i-1)j + A_1 S_i(j-1)) / (i + j)``. s is that of the
    position alone; equal positions are computed once.

    On CPUs; ``torch.matrix_exp`` elsewhere, for few matrices, under ``torch.func``, and in compiled
    or exported programs.

    Args:
        positions: float64.
        skew: the skew-symmetric matrices A, of all heads H and blocks N of width B; float64.
    """
    if not _is_served(positions, skew):
        return _by_definition(positions, skew, dtype)
    distinct, index = positions.flatten(0, 1), None
    if len(positions) > 1 and not positions.requires_grad:
        distinct, index = torch.unique(distinct, dim=0, return_inverse=True)
    with torch.no_grad():
        largest = distinct.abs() @ _norms(skew) / MOST_RADIANS
        fraction, exponent = largest.frexp()
        squarings = exponent.clamp(min=0).masked_fill(~largest.isfinite(), 0)
        factor = (fraction / largest).masked_fill(squarings == 0, 1.0)  # 2^-s, exactly
        squarings, order = squarings.sort(stable=True)
        place = order.argsort()
        place = place if index is None else place[index]
        times, counts = torch.unique_consecutive(squarings, return_counts=True)
    monomials = _monomials((distinct * factor.unsqueeze(-1))[order])
    coefficients = _coefficients(skew.flatten(1, 2))
    powers = (monomials @ coefficients.flatten(1)).view(-1, *coefficients.shape[1:])
    step = max(1, CHUNK // coefficients[0].numel())
    squared = []
    for part, often in zip(torch.split(powers, counts.tolist()), times.tolist(), strict=True):
        for piece in torch.split(part, step):
            for _ in range(often):
                piece = piece @ piece
            squared.append(piece.to(dtype))
    rotations = torch.cat(squared).index_select(0, place)
    return rotations.view(*positions.shape[:2], *skew.shape[1:]).transpose(1, 2)


def _is_served(positions: Tensor, skew: Tensor) -> bool:
    if is_transformed() or needs_dispatch(positions, skew) or not has_values(positions):
        return False
    count = positions.shape[0] * positions.shape[1]
    if count < FEWEST or count * math.prod(skew.shape[1:3]) < FEWEST_MATRICES:
        return False
    return skew.device.type == "cpu" and has_values(skew)


def _by_definition(positions: Tensor, skew: Tensor, dtype: torch.dtype) -> Tensor:
    exponents = torch.einsum("bla,ahnij->bhlnij", positions, skew).contiguous()
    return torch.matrix_exp(exponents).to(dtype)


def _norms(skew: Float[Tensor, "2 H N B B"]) -> Float[Tensor, " 2"]:
    """An upper bound of the spectral norms of each axis.

    Singular values of skew-symmetric matrices come in pairs, so their squares sum to twice the
    largest at least.
    """
    frobenius = skew.square().sum((-1, -2)).div(2).sqrt()
    return torch.minimum(frobenius, skew.abs().sum(-1).amax(-1)).flatten(1).amax(1)


def _monomials(positions: Float[Tensor, "P 2"]) -> Float[Tensor, "P T"]:
    """``p_0^(n-j) p_1^j`` for degrees n of 0 … ``DEGREE`` and j of 0 … n."""
    first, second = positions[:, :1], positions[:, 1:]
    degrees = [torch.ones_like(first)]
    for _ in range(DEGREE):
        last = degrees[-1]
        degrees.append(torch.cat([last * first, last[:, -1:] * second], 1))
    return torch.cat(degrees, 1)


def _coefficients(skew: Float[Tensor, "2 K B B"]) -> Float[Tensor, "T K B B"]:
    """The matrices that the monomials are multiplied with."""
    _, count, width, _ = skew.shape
    both = torch.cat(list(skew), 1)  # [K, 2 B, B]
    last = torch.eye(width, dtype=skew.dtype).expand(count, width, width)
    degrees = [last]
    for n in range(1, DEGREE + 1):
        products = both @ last / n  # [K, 2 B, n B], side by side
        last = pad(products[:, :width], (0, width)) + pad(products[:, width:], (width, 0))
        degrees.append(last)
    side_by_side = torch.cat(degrees, 2).view(count, width, -1, width)
    return side_by_side.permute(2, 0, 1, 3).contiguous()
