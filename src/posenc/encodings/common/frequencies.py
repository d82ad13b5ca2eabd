"""The geometric ladder of frequencies that sines, rotations and decays share, and their angles."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.precision import widest

__all__ = ["angles_at", "geometric_frequencies"]

TURN = 2 * math.pi


def geometric_frequencies(
    count: int, width: float, base: float, *, like: Tensor
) -> Float[Tensor, " T"]:
    """``base^(-2t/width)`` for t = 0 … count-1, rounded once to ``like``'s dtype, on its device.

    Computed afresh and in float64: a stored buffer would follow the module into bfloat16, where
    base-10000 frequencies are off by radians at position 2048.
    """
    device = torch.device("cpu") if like.device.type == "mps" else like.device
    steps = torch.arange(count, dtype=torch.float64, device=device)
    return torch.pow(base, -2.0 * steps / width).to(like)


def angles_at(
    positions: Float[Tensor, "*dims"], frequencies: Float[Tensor, "*dims"]
) -> Float[Tensor, "*dims"]:
    """``positions · frequencies`` less whole turns: in -π … π, in the positions' dtype.

    In turns, both factors are split into halves of at most 29 bits, whose products float64 holds
    exactly, so that whole turns can be dropped without error. What is left depends on the product
    alone, however large the position: two positions up to 2^53 differ by the angle of their
    difference. On a device without float64 the product is taken in float32, which is off by
    ``|positions · frequencies| · 2^-24`` radians.

    Args:
        positions: any reals, float32 or float64, to be broadcast with the frequencies.
        frequencies: in radians a token, in ``widest`` if they are to be as exact as can be.
    """
    wide = widest(positions.device)
    if wide != torch.float64:
        return positions * frequencies.to(positions.dtype)
    shares = _halves(frequencies.to(wide) / TURN)
    short = positions.dtype == torch.float32  # all of it fits in a first half
    parts = (positions.to(wide),) if short else _halves(positions)
    turns = positions.new_zeros((), dtype=wide)
    for part in parts:
        for share in shares:
            product = part * share
            turns = turns + (product - product.round())
    return (turns * TURN).to(positions.dtype)


def _halves(x: Float[Tensor, "*dims"]) -> tuple[Tensor, Tensor]:
    """``x`` as a number of 24 bits and the rest, of at most 29; gradients pass to the rest."""
    most = torch.finfo(torch.float32).max
    first = x.detach().clamp(-most, most).to(torch.float32).to(x.dtype)
    return first, x - first
