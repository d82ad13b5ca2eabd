"""Rotating the pairs of a head."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.errors import UnknownNameError

__all__ = ["Pairing", "require_pairing", "rotate"]

Pairing = Literal["half", "adjacent"]


def require_pairing(pairing: Pairing) -> Pairing:
    """``pairing`` if it is one; UnknownNameError otherwise."""
    if pairing not in ("half", "adjacent"):
        raise UnknownNameError.of("pairing", pairing, ("half", "adjacent"))
    return pairing


def rotate(
    x: Float[Tensor, "B H L D"], angles: Float[Tensor, "b L T"], pairing: Pairing
) -> Float[Tensor, "B H L D"]:
    """The first 2T features of each head rotated by ``angles`` in radians, the rest untouched.

    Pair t is features (t, t + T) with pairing ``"half"`` and (2t, 2t + 1) with ``"adjacent"``;
    ``(a, b) → (a cos φ - b sin φ, a sin φ + b cos φ)``. Computed in the angles' precision and
    returned in ``x``'s dtype.
    """
    turned = 2 * angles.shape[-1]
    cosine, sine = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
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
