"""Tensors as kernels take them. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.kernels.arguments import Curve, Numbers, Rotary, Table, Tokens
from posenc.attention.backends.triton.operands import Ends, Operands
from posenc.attention.backends.triton.segments import GRANULE

__all__ = [
    "by_row",
    "curve",
    "low_and_high",
    "maybe",
    "numbers",
    "padded",
    "precision_of",
    "rotary",
    "table",
    "tokens",
]


def tokens(x: Tensor) -> Tokens:
    """A tensor ``[B, H, L, width]``; features have to lie together."""
    row, head, step, _ = x.stride()
    return Tokens(x, row, head, step, constexpr(x.shape[-1]), constexpr(padded(x.shape[-1])))


def numbers(x: Tensor) -> Numbers:
    """A tensor ``[B, H, L]``; tokens have to lie together."""
    return Numbers(x, x.stride(0), x.stride(1))


def table(x: Tensor) -> Table:
    """A contiguous tensor ``[h, N, width]``."""
    head = 0 if x.shape[0] == 1 else x.stride(0)
    return Table(x, head, constexpr(x.shape[-1]), constexpr(padded(x.shape[-1])))


def rotary(x: Tensor | None, width: int, *, adjacent: bool) -> Rotary | None:
    """Factors ``[b, h, L, 2T]`` for the pairs of heads of a width, cosines and then sines."""
    if x is None:
        return None
    batch, head, step, _ = (
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    half = (width + 1) // 2
    pairs, block = constexpr(x.shape[-1] // 2), constexpr(padded(half))
    return Rotary(x, batch, head, step, pairs, constexpr(half), block, constexpr(adjacent))


def curve(x: Operands, zero: int) -> Curve | None:
    """The function of the distance, if there is one."""
    rates, slope, knots = x.curve_rates, x.curve_slope, x.curve_knots
    if rates is None or slope is None or knots is None:
        return None
    block = padded(len(knots))
    knots = torch.nn.functional.pad(knots, (0, block - len(knots)), value=float("inf"))
    whole = torch.nn.functional.pad(rates, (0, -rates.shape[1] % GRANULE), mode="replicate")
    granules = whole.view(len(whole), -1, GRANULE)
    extremes = torch.stack([granules.amin(-1), granules.amax(-1)], dim=1)
    return Curve(
        x.curve_numbers,
        *by_row(rates),
        *by_row(extremes),
        extremes.shape[2],
        knots,
        slope,
        x.curve_intercept,
        zero,
        constexpr(slope.shape[1]),
        constexpr(block),
        constexpr(GRANULE),
        constexpr(True),
    )


def maybe(form: Callable[[Tensor], Any], x: Tensor | None) -> Any:
    return None if x is None else form(x)


def low_and_high(ends: Ends | None, *, flip: bool) -> tuple[Any, Any]:
    if ends is None:
        return None, None
    first, last = numbers(ends.first), numbers(ends.last)
    return (last, first) if flip else (first, last)


def by_row(x: Tensor | None) -> tuple[Tensor | None, int]:
    """A tensor ``[b, …]`` with its stride from batch row to batch row, 0 where all agree."""
    return (None, 0) if x is None else (x, 0 if x.shape[0] == 1 else x.stride(0))


def padded(width: int) -> int:
    """The power of two that kernels compute with: 16 or more, which products of matrices need."""
    return max(16, 1 << (width - 1).bit_length())


def precision_of(dtype: torch.dtype) -> tuple[str, str]:
    """Precision of products of this dtype, and of those of float32 factors beside them.

    Three products in TF32 err about as little as one in float32, and take tensor cores.
    """
    if dtype != torch.float32:
        return "ieee", "tf32x3"
    chosen = "tf32" if torch.get_float32_matmul_precision() == "medium" else "tf32x3"
    return chosen, chosen
