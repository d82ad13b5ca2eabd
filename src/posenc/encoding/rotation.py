"""Rotations of pairs of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Pairing = Literal["half", "adjacent"]
"""Pair t is features (t, t + T) of T pairs (``"half"``), or (2t, 2t + 1)."""


Factors = tuple[Float[Tensor, "b h L T"], Float[Tensor, "b h L T"]]
"""Cosine and sine of each pair's angle, or other real and imaginary parts."""


def apply_rotation(
    x: Float[Tensor, "B H L D"],
    cosine: Float[Tensor, "b h L T"],
    sine: Float[Tensor, "b h L T"],
    pairing: Pairing,
) -> Float[Tensor, "B H L D"]:
    """The first 2T features of each head as complex numbers times ``cosine + i·sine``.

    Computed in the factors' precision, returned in ``x``'s dtype.
    """
    width = 2 * cosine.shape[-1]
    first, second = (
        x[..., :width].chunk(2, dim=-1)
        if pairing == "half"
        else (x[..., 0:width:2], x[..., 1:width:2])
    )
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    if pairing == "half":
        joined = torch.cat(rotated, dim=-1)
    else:
        joined = torch.stack(rotated, dim=-1).flatten(-2)
    joined = joined.to(x.dtype)
    return joined if width == x.shape[-1] else torch.cat([joined, x[..., width:]], dim=-1)


def both_features(of_pairs: Float[Tensor, "*dims T"], pairing: Pairing) -> Float[Tensor, "*dims R"]:
    """A number of each pair for both of its features."""
    if pairing == "half":
        return torch.cat([of_pairs, of_pairs], dim=-1)
    return of_pairs.repeat_interleave(2, dim=-1)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Pairs of features as complex numbers, each times a factor of its token.

    ``(a, b) → (a·cosine - b·sine, a·sine + b·cosine)``: of an angle, it is turned; a gain is in
    both. Features beyond the pairs stay as they are.

    Args:
        query: cosines and sines, each ``[B|1, H|1, Q, T]`` in float32 or float64.
        key: each ``[B|1, G|1, K, T]``; keys keep their number of heads.
        pairing: of the first 2T features.
    """

    query: Factors
    key: Factors
    pairing: Pairing

    @property
    def has_gradient(self) -> bool:
        """True if the factors require a gradient."""
        return any(factor.requires_grad for factor in (*self.query, *self.key))

    def apply(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"]
    ) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B G K D"]]:
        """Rotated queries and keys."""
        rotated = apply_rotation(q, *self.query, self.pairing)
        return rotated, apply_rotation(k, *self.key, self.pairing)


@dataclass(frozen=True, eq=False)
class RotatedBand:
    """A band of pairs of queries and keys, with the rotation of these pairs.

    Args:
        query: cosines and sines, as of ``Rotation``.
        key: likewise; None where these keys stay as they are.
        pairing: as of ``Rotation``.
        window: least and greatest key order − query order of the band.
        intervals: ``[b, Q, 2]``, as of ``Grid``; None: none but those of the grid.
    """

    query: Factors
    key: Factors | None
    pairing: Pairing
    window: tuple[int, int]
    intervals: Int[Tensor, "b Q 2"] | None = None
