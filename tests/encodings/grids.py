"""Awkward grids that every attention method is tried on, and how its numbers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc import Grid, Layout

GRIDS = {
    "causal": Grid.of(Layout.sequence(7), causal=True),
    "both ways": Grid.of(Layout.sequence(7)),
    "one token": Grid.of(Layout.sequence(1)),
    "more keys": Grid(Layout.sequence(3, start=6), Layout.sequence(9), causal=True),
    "far away": Grid(Layout.sequence(2, start=5000), Layout.sequence(5)),
    "fractions": Grid.of(Layout.at(torch.tensor([0.0, 0.5, 2.25, 9.75]))),
    "own positions a row": Grid.of(Layout.at(torch.tensor([[0.0, 3.0, 4.0], [7.0, 1.0, 40.0]]))),
    "packed": Grid.of(Layout.packed([3, 4]), causal=True),
    "padded": Grid.of(Layout.padded([2, 5], side="left"), causal=True),
    "window": Grid.of(Layout.sequence(8), causal=True, window=3),
}

CAUSAL = {name: grid for name, grid in GRIDS.items() if grid.causal}


def inputs(grid: Grid, *, heads: int = 6, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values in float64, with grouped heads."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int, length: int) -> Tensor:
        return torch.randn(2, count, length, width, generator=generator, dtype=torch.float64)

    keys = grid.key.length
    return draw(heads, grid.query.length), draw(heads // 2, keys), draw(heads // 2, keys)


def agree_with_gradients(
    got: Tensor, expected: Tensor, leaves: Sequence[Tensor], **tolerance: Any
) -> None:
    """Require equal numbers with equal gradients of ``leaves``, zeros where there are none."""
    torch.testing.assert_close(got, expected, **tolerance)
    found, wanted = (
        torch.autograd.grad(
            side.sin().sum() + 0.0 * leaves[0].sum(), leaves, None, True, materialize_grads=True
        )
        for side in (got, expected)
    )
    torch.testing.assert_close(found, wanted, **tolerance)
