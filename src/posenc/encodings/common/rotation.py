"""Rotary transforms of pairs of features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Width
from posenc.encoding import Pairing, QueryKeyTransform, Rotation, apply_rotation
from posenc.encoding.prepared import reused
from posenc.encoding.rotation import Factors
from posenc.encoding.tensors import Keys, Queries, repeat_heads
from posenc.encodings.common.special_tokens import zero_special
from posenc.grid import Grid
from posenc.layout import Layout

T = TypeVar("T")

KEPT = 2**24
"""Tokens times parameters up to which rotations are kept for further calls."""


def kept_of_positions(
    part: QueryKeyTransform, layout: Layout, compute: Callable[[Layout], T], *kind: str
) -> T:
    """``compute(layout)`` of a trained part, kept while its parameters and positions are the same.

    Args:
        kind: of results that one part has several of.
    """
    trained = sum(x.numel() for x in part.parameters())
    if not trained or layout.positions[..., 0].numel() * trained > KEPT:
        return compute(layout)
    tensors = (layout.positions, layout.special)
    return reused(partial(compute, layout), "positions", *kind, layers=(part,), tensors=tensors)


def both_sides(grid: Grid, compute: Callable[[Layout], T]) -> tuple[T, T]:
    """The results of queries and of keys, computed once where these are the same tokens."""
    query = compute(grid.query)
    return query, query if grid.key is grid.query else compute(grid.key)


def cos_sin(angles: Float[Tensor, "b *h L T"], *, gain: float = 1.0) -> Factors:
    """``gain · cos φ`` and ``gain · sin φ`` of angles in radians.

    Angles are ``[B|1, H|1, L, T]``, or ``[B|1, L, T]`` for all heads.
    """
    angles = angles.unsqueeze(1) if angles.dim() == 3 else angles
    cosine, sine = angles.cos(), angles.sin()
    return (cosine, sine) if gain == 1 else (cosine * gain, sine * gain)


class PairProducts(QueryKeyTransform, ABC):
    """Each pair of features, as a complex number, times a factor of its position.

    A subclass defines ``factors``, shared by the heads or one per head; keys are then repeated to
    one per query head.

    Args:
        head_dim: width D of a head.
        pairing: ``"half"`` or ``"adjacent"``, as in ``Rotation``.

    Raises:
        UnknownNameError: for another ``pairing``.
    """

    head_dim: Width
    pairing: Pairing = field(init=False, default="half")

    @abstractmethod
    def factors(self, layout: Layout) -> Factors:
        """Real and imaginary parts ``[B|1, H|1, L, T]`` of the factors, float32 or float64."""

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        query, key = self._both(grid)
        if key[0].shape[1] > 1:
            k = repeat_heads(k, key[0].shape[1])
        return apply_rotation(q, *query, self.pairing), apply_rotation(k, *key, self.pairing)

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        query, key = self._both(grid)
        if key[0].shape[1] not in (1, k.shape[1]):
            return None
        return Rotation(query, key, self.pairing)

    def _both(self, grid: Grid) -> tuple[Factors, Factors]:
        """Factors of queries and of keys."""
        return both_sides(grid, lambda layout: kept_of_positions(self, layout, self.factors))


class Rotary(PairProducts, ABC):
    """``q'_i = R(p_i) q_i``, ``k'_j = R(p_j) k_j``: each pair is rotated by an angle.

    A subclass defines ``angles``.

    Args:
        head_dim, pairing: as in ``PairProducts``.
        gain: factor of the rotated features of queries and of keys.
    """

    gain = 1.0

    @abstractmethod
    def angles(self, layout: Layout) -> Float[Tensor, "b *h L T"]:
        """Angle of every token and pair in radians modulo 2π, in the positions' dtype.

        ``[B|1, L, T]``, or ``[B|1, H, L, T]`` with angles per head. Computed by ``angles_at``,
        exact at any integer position. Special tokens, which have none, are not rotated by them.
        """

    def logit_factor(self, grid: Grid) -> float:
        return self.gain**2

    def factors(self, layout: Layout) -> Factors:
        return cos_sin(zero_special(self.angles(layout), layout), gain=self.gain)
