"""Tokens that stand nowhere, such as a class token, in scores by offset."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["has_special", "special_pairs"]


def has_special(grid: Grid) -> bool:
    """Whether a side marks special tokens (known without reading the device)."""
    return grid.query.special is not None or grid.key.special is not None


def special_pairs(grid: Grid) -> Bool[Tensor, "b Q K"] | None:
    """Pairs of which a token is special, which have no offset; None where none is marked."""
    if not has_special(grid):
        return None
    return _marks(grid.query).unsqueeze(2) | _marks(grid.key).unsqueeze(1)


def _marks(layout: Layout) -> Bool[Tensor, "b L"]:
    if layout.special is None:
        return torch.zeros_like(layout.order, dtype=torch.bool)
    return layout.special
