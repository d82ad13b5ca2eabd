"""Biases of attention logits, by their values for a few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN, SAME = -1e4, 1e-9
"""Logits below are masked; those that differ by less are the same."""


@dataclass(frozen=True)
class Bias:
    """A bias, and the factor of products of queries and keys beside it.

    Args:
        shape: None without one, ``"linear"``, ``"by offset"``, ``"by position"`` or ``"by content
            and position"``.
        slopes: of a linear bias: its decrease a token, for each head.
        scale: the factor; None: not known.
    """

    shape: str | None
    slopes: tuple[float, ...] = ()
    scale: float | None = None


def bias_of(logits: Tensor) -> Bias:
    """The bias in logits [heads, queries, keys] of zero products."""
    shown = logits > HIDDEN
    if logits.shape[-1] != logits.shape[-2]:
        values = logits[shown]
        differ = len(values) and float(values.max() - values.min()) > SAME
        return Bias("by position" if differ else None)
    # Softmax ignores a constant of each row.
    relative = logits - logits.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    if not bool(shown.any()) or float(relative[shown].abs().max()) < SAME:
        return Bias(None)
    pairs = shown[:, 1:, 1:] & shown[:, :-1, :-1]
    moved = (relative[:, 1:, 1:] - relative[:, :-1, :-1])[pairs]
    if len(moved) and float(moved.abs().max()) > 1e-6:
        return Bias("by position")
    falling = -relative[:, -1].flip(-1)  # [heads, distance back]
    slope = falling[:, 1:2]
    if float((falling - slope * torch.arange(falling.shape[-1])).abs().max()) < 1e-6:
        return Bias("linear", tuple(float(f"{s:.5g}") for s in slope.flatten().tolist()))
    return Bias("by offset")


def factor_of(products: Tensor, content: Tensor, silent: Tensor) -> float | None:
    """The factor from products of queries and keys to logits; None if there is more.

    Args:
        products: [heads, queries, keys].
        content: logits less ``silent``.
        silent: logits of zero products, masked ones included.
    """
    shown = silent > HIDDEN
    if products.shape != content.shape or not bool(shown.any()):
        return None
    a, b = content[shown].double(), products[shown].double()
    factor = (a @ b) / (b @ b)
    linear = float((a - factor * b).abs().max()) <= 1e-3 * float(a.abs().max())
    return float(f"{float(factor):.4g}") if linear else None
