"""Special tokens (such as a class token), which have no position."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.encoding.tensors import Scores
from posenc.grid import Grid
from posenc.layout import Layout


def has_special(grid: Grid) -> bool:
    """True if queries or keys have a mask of special tokens; reads no tensor."""
    return grid.query.special is not None or grid.key.special is not None


def special_pairs(grid: Grid) -> Bool[Tensor, "b Q K"] | None:
    """Pairs with a special token, which have no offset; None without special tokens."""
    if not has_special(grid):
        return None
    return special_mask(grid.query).unsqueeze(2) | special_mask(grid.key).unsqueeze(1)


def special_mask(layout: Layout) -> Bool[Tensor, "b L"]:
    """Special tokens, False for all where a layout has none."""
    if layout.special is None:
        return torch.zeros_like(layout.order, dtype=torch.bool)
    return layout.special


def zero_special_pairs(score: Scores, grid: Grid) -> Scores:
    """``score`` with 0 for pairs with a special token."""
    special = special_pairs(grid)
    return score if special is None else score.masked_fill(special.unsqueeze(1), 0.0)


def zero_special(values: Float[Tensor, "b *h L C"], layout: Layout) -> Float[Tensor, "b *h L C"]:
    """``values`` with 0 for special tokens."""
    if layout.special is None:
        return values
    special = layout.special.unsqueeze(-1)
    return values.masked_fill(special.unsqueeze(1) if values.dim() == 4 else special, 0.0)
