"""Tensors as kernels take them. Imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.kernels.arguments import Numbers, Table, Tokens

__all__ = ["numbers", "padded", "precision_of", "table", "tokens"]


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


def padded(width: int) -> int:
    """The power of two that kernels compute with: 16 or more, which products of matrices need."""
    return max(16, 1 << (width - 1).bit_length())


def precision_of(dtype: torch.dtype) -> tuple[str, str]:
    """How products of this dtype are computed, and those of float32 factors beside them.

    Three products in TF32 err about as little as one in float32, and take tensor cores.
    """
    if dtype != torch.float32:
        return "ieee", "tf32x3"
    chosen = "tf32" if torch.get_float32_matmul_precision() == "medium" else "tf32x3"
    return chosen, chosen
