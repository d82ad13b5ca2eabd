"""Tensors as kernels take them. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.kernels.arguments import (
    Curve,
    Numbers,
    RotaryArguments,
    TableArguments,
    TokenArguments,
)
from posenc.attention.backends.triton.posing import SUMMARY_BLOCK


@dataclass(frozen=True, eq=False)
class Ends:
    """A number per token for the first entry of the tables, and one for the last: ``[B, H, L]``."""

    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: int, heads: int, length: int, *, like: Tensor) -> Ends:
        """Uninitialised numbers, in float32."""
        size = (2, batch, heads, length)
        first, last = like.new_empty(size, dtype=torch.float32).unbind(0)
        return cls(first, last)

    def add_to_rows(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Gradients of rows ``[h, N, F]`` with those at both ends added, of sums a token."""
        wide = vectors.float()
        for entry, sums in ((0, self.first), (rows.shape[1] - 1, self.last)):
            added = (sums.unsqueeze(-2) @ wide).squeeze(-2).sum(0)
            rows[:, entry] += added.sum(0, keepdim=True) if rows.shape[0] == 1 else added
        return rows


def tokens(x: Tensor) -> TokenArguments:
    """A tensor ``[B, H, L, width]``; features have to lie together."""
    row, head, step, _ = x.stride()
    return TokenArguments(
        x, row, head, step, constexpr(x.shape[-1]), constexpr(padded(x.shape[-1]))
    )


def numbers(x: Tensor) -> Numbers:
    """A tensor ``[B, H, L]``; tokens have to lie together."""
    return Numbers(x, x.stride(0), x.stride(1))


def table(x: Tensor) -> TableArguments:
    """A contiguous tensor ``[h, N, width]``."""
    head = 0 if x.shape[0] == 1 else x.stride(0)
    return TableArguments(x, head, constexpr(x.shape[-1]), constexpr(padded(x.shape[-1])))


def rotary(
    cosine: Tensor | None, sine: Tensor | None, width: int, *, adjacent: bool
) -> RotaryArguments | None:
    """Factors ``[b, h, L, T]`` for the pairs of heads of a width.

    Kernels read sines T numbers after the cosines; the halves of one tensor are.
    """
    if cosine is None or sine is None:
        return None
    count = cosine.shape[-1]
    behind = cosine.data_ptr() + count * cosine.element_size()
    if sine.data_ptr() != behind or sine.stride() != cosine.stride():
        cosine = torch.cat([cosine, sine], dim=-1)
    batch, head, step, _ = (
        0 if size == 1 else stride
        for size, stride in zip(cosine.shape, cosine.stride(), strict=True)
    )
    half = (width + 1) // 2
    pairs, block = constexpr(count), constexpr(padded(half))
    return RotaryArguments(
        cosine, batch, head, step, pairs, constexpr(half), block, constexpr(adjacent)
    )


def curve(tensors: Sequence[Tensor], zero: int) -> Curve:
    """A function of the distance: numbers by entry, knots, slopes, intercepts and rates.

    ``zero``: the entry of offset 0, or the nearest to it.
    """
    values, knots, slope, intercept, rates = tensors
    block = padded(len(knots))
    knots = torch.nn.functional.pad(knots, (0, block - len(knots)), value=float("inf"))
    padded_rates = torch.nn.functional.pad(
        rates, (0, -rates.shape[1] % SUMMARY_BLOCK), mode="replicate"
    )
    summary_blocks = padded_rates.view(len(padded_rates), -1, SUMMARY_BLOCK)
    extremes = torch.stack([summary_blocks.amin(-1), summary_blocks.amax(-1)], dim=1)
    return Curve(
        values,
        *by_row(rates),
        *by_row(extremes),
        extremes.shape[2],
        knots,
        slope,
        intercept,
        zero,
        constexpr(slope.shape[1]),
        constexpr(block),
        constexpr(SUMMARY_BLOCK),
        constexpr(True),
    )


def maybe(form: Callable[[Tensor], Any], x: Tensor | None) -> Any:
    return None if x is None else form(x)


def low_and_high(ends: Ends | None, *, for_keys: bool) -> tuple[Any, Any]:
    if ends is None:
        return None, None
    first, last = numbers(ends.first), numbers(ends.last)
    return (last, first) if for_keys else (first, last)


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
