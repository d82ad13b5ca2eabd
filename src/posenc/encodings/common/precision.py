"""Positions in float32 or better: wide layers, geometric frequencies and exact angles."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.runtime import widest, without_autocast


class WideLinear(nn.Linear):
    """``nn.Linear`` in the dtype of its input, whatever the dtype of its weights or autocast's."""

    def forward(self, x: Float[Tensor, "*dims I"]) -> Float[Tensor, "*dims O"]:
        return wide_product(x, self.weight, self.bias)


class WideLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` in the dtype of its input, whatever the dtype of its weights."""

    def forward(self, x: Float[Tensor, "*dims I"]) -> Float[Tensor, "*dims I"]:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def wide_product(
    x: Float[Tensor, "*dims I"],
    weight: Float[Tensor, "O I"],
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*dims O"]:
    """``x weightᵀ + bias`` in the dtype of ``x``, whatever that of the weights or autocast's."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    with without_autocast(x.device):
        return nn.functional.linear(x, weight, bias)


def wider(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """``x`` in float64 where its device has it, else in float32."""
    return x.to(widest(x.device))


def at_least_single(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """``x`` in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_zero_gradient(x: Tensor, parameter: Tensor) -> Tensor:
    """``x``, with a zero gradient for a parameter that the call does not use.

    DistributedDataParallel requires a gradient for every parameter.
    """
    return x + 0.0 * parameter.sum().to(x.dtype)


TURN = 2 * math.pi


def geometric_frequencies(
    count: int, width: float, base: float, *, like: Tensor
) -> Float[Tensor, " T"]:
    """``base^(-2t/width)`` for t = 0 … count-1, rounded once to ``like``'s dtype, on its device.

    Recomputed at each call in float64: a buffer would be cast to bfloat16 with the module, where
    base-10000 frequencies are off by radians at position 2048.
    """
    device = like.device if widest(like.device) == torch.float64 else torch.device("cpu")
    steps = torch.arange(count, dtype=torch.float64, device=device)
    return torch.pow(base, -2.0 * steps / width).to(like)


def geometric_angles(
    positions: Float[Tensor, "*dims"], count: int, width: float, base: float
) -> Float[Tensor, "*dims"]:
    """``positions · base^(-2t/width)`` for t = 0 … count-1, as ``angles_at``.

    Args:
        positions: ``[…, 1]``, the frequencies' axis last; or of ``count`` frequencies each its own.
    """
    frequencies = geometric_frequencies(count, width, base, like=wider(positions))
    return angles_at(positions, frequencies)


def angles_at(
    positions: Float[Tensor, "*dims"], frequencies: Float[Tensor, "*dims"]
) -> Float[Tensor, "*dims"]:
    """``positions · frequencies`` less whole turns: in -π … π, in the positions' dtype.

    Measured in turns, both factors are split into halves of at most 29 bits, whose products are
    exact in float64, so whole turns are dropped without error: the angles of two positions up to
    2^53 differ exactly by the angle of their difference. Without float64 on the device the product
    is taken in float32, with an error of ``|positions · frequencies| · 2^-24`` radians.

    Args:
        positions: any reals, float32 or float64, broadcast with the frequencies.
        frequencies: radians per token; pass them in ``widest`` for full precision.
    """
    wide = widest(positions.device)
    if wide != torch.float64:
        return positions * frequencies.to(positions.dtype)
    frequency_parts = _halves(frequencies.to(wide) / TURN)
    exact = positions.dtype == torch.float32  # 24 bits: the first half holds them all
    position_parts = (positions.to(wide),) if exact else _halves(positions)
    turns = positions.new_zeros((), dtype=wide)
    for position in position_parts:
        for frequency in frequency_parts:
            product = position * frequency
            turns = turns + (product - product.round())
    return (turns * TURN).to(positions.dtype)


def _halves(x: Float[Tensor, "*dims"]) -> tuple[Tensor, Tensor]:
    """``x`` split into 24 leading bits and at most 29 others; gradients flow to the latter."""
    largest = torch.finfo(torch.float32).max
    first = x.detach().clamp(-largest, largest).to(torch.float32).to(x.dtype)
    return first, x - first
