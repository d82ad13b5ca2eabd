"""Rotating the pairs of a head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Factor, Width, checked
from posenc.encoding import Pairing, QueryKeyTransform, Rotation
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout

__all__ = [
    "Pairing",
    "Rotary",
    "factors",
    "one_a_head",
    "require_width",
    "rotate",
    "still_where_special",
    "turn",
]


def rotate(
    x: Float[Tensor, "B H L D"],
    angles: Float[Tensor, "b h L T"],
    pairing: Pairing,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "B H L D"]:
    """The first 2T features of each head rotated by ``angles`` in radians, the rest untouched.

    Angles are ``[B|1, H|1, L, T]``, or ``[B|1, L, T]`` for all heads alike. Pair t is features
    (t, t + T) with pairing ``"half"`` and (2t, 2t + 1) with ``"adjacent"``;
    ``(a, b) → (a cos φ - b sin φ, a sin φ + b cos φ)``, times ``gain``. Computed in the angles'
    precision and returned in ``x``'s dtype.
    """
    return turn(x, *factors(angles, gain=gain), pairing)


def factors(
    angles: Float[Tensor, "b *h L T"], *, gain: float = 1.0
) -> tuple[Float[Tensor, "b h L T"], Float[Tensor, "b h L T"]]:
    """``gain · cos φ`` and ``gain · sin φ`` of angles as ``rotate`` takes them."""
    angles = angles.unsqueeze(1) if angles.dim() == 3 else angles
    cosine, sine = angles.cos(), angles.sin()
    return (cosine, sine) if gain == 1 else (cosine * gain, sine * gain)


def turn(
    x: Float[Tensor, "B H L D"],
    cosine: Float[Tensor, "b h L T"],
    sine: Float[Tensor, "b h L T"],
    pairing: Pairing,
) -> Float[Tensor, "B H L D"]:
    """The first 2T features of each head as complex numbers times ``cosine + i·sine``.

    Pairs are those of ``rotate``. Computed in the factors' precision, returned in ``x``'s dtype.
    """
    turned = 2 * cosine.shape[-1]
    first, second = (
        x[..., :turned].chunk(2, dim=-1)
        if pairing == "half"
        else (x[..., 0:turned:2], x[..., 1:turned:2])
    )
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    if pairing == "half":
        joined = torch.cat(rotated, dim=-1)
    else:
        joined = torch.stack(rotated, dim=-1).flatten(-2)
    joined = joined.to(x.dtype)
    return joined if turned == x.shape[-1] else torch.cat([joined, x[..., turned:]], dim=-1)


def require_width(x: Tensor, head_dim: int) -> None:
    """ArgumentError unless ``x`` has heads of width ``head_dim``."""
    if x.shape[-1] != head_dim:
        raise ArgumentError(
            "q",
            expected=f"head width {head_dim}, the encoding's head_dim",
            got=x.shape[-1],
            remedy="Create the encoding with the attention's head_dim.",
        )


def one_a_head(k: Float[Tensor, "B G K D"], heads: int) -> Float[Tensor, "B H K D"]:
    """Keys repeated to one a query head, for methods in which each head turns its own way.

    Raises:
        ArgumentError: when k's heads do not divide ``heads``.
    """
    if heads % k.shape[1]:
        raise ArgumentError(
            "k",
            expected=f"a number of heads that divides the encoding's {heads}",
            got=k.shape[1],
            remedy="Create the encoding with the attention's query heads.",
        )
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], dim=1)


class Rotary(QueryKeyTransform, ABC):
    """``q'_i = R(p_i) q_i``, ``k'_j = R(p_j) k_j``: pair t turned by an angle of the position.

    A subclass writes ``angles``. Heads may share them or have their own; keys then come back with
    one head a query head.

    Args:
        head_dim: width D of a head.
        pairing: ``"half"`` or ``"adjacent"``, see ``rotate``.
        gain: factor of the rotated features of queries and of keys.

    Raises:
        UnknownNameError: for another ``pairing``.
    """

    head_dim: int

    @checked
    def __init__(self, *, head_dim: Width, pairing: Pairing, gain: Factor = 1.0) -> None:
        super().__init__()
        self.head_dim, self.gain = head_dim, gain
        self.pairing: Pairing = pairing

    @abstractmethod
    def angles(self, layout: Layout) -> Float[Tensor, "b *h L T"]:
        """Angle of every token and pair in radians, in the positions' float32 or float64.

        Less whole turns (``angles_at``), so that they are exact at any integer position.
        ``[B|1, L, T]``, or ``[B|1, H, L, T]`` where each head has its own; 0 for special tokens.
        """

    def forward(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"], grid: Grid
    ) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B G K D"]]:
        require_width(q, self.head_dim)
        query = factors(self.angles(grid.query), gain=self.gain)
        key = query
        if grid.key is not grid.query:
            key = factors(self.angles(grid.key), gain=self.gain)
        if key[0].shape[1] > 1:
            k = one_a_head(k, key[0].shape[1])
        return turn(q, *query, self.pairing), turn(k, *key, self.pairing)

    def lower(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"], grid: Grid
    ) -> Rotation | None:
        require_width(q, self.head_dim)
        query = factors(self.angles(grid.query), gain=self.gain)
        key = query
        if grid.key is not grid.query:
            key = factors(self.angles(grid.key), gain=self.gain)
        if key[0].shape[1] not in (1, k.shape[1]):
            return None
        return Rotation(query, key, self.pairing)

    def rotation(
        self, layout: Layout
    ) -> tuple[Float[Tensor, "b h L T"], Float[Tensor, "b h L T"], Pairing] | None:
        return *factors(self.angles(layout), gain=self.gain), self.pairing


def still_where_special(
    angles: Float[Tensor, "b *h L T"], layout: Layout
) -> Float[Tensor, "b *h L T"]:
    """``angles`` with 0 for the layout's special tokens, which stand nowhere."""
    if layout.special is None:
        return angles
    special = layout.special.unsqueeze(-1)
    return angles.masked_fill(special.unsqueeze(1) if angles.dim() == 4 else special, 0.0)
