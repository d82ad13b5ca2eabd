"""Context-aware biases against loops over the authors' definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc import Grid, Layout
from posenc.encodings.score.cable import Cable
from tests.encodings.grids import CAUSAL, agree_with_gradients

DIM, HEADS = 12, 3


def make() -> Cable:
    torch.manual_seed(6)
    cable = Cable(dim=DIM, heads=HEADS).double()
    torch.nn.init.normal_(cable.gate.weight)
    torch.nn.init.normal_(cable.gate.bias)
    return cable


@pytest.mark.parametrize("grid", CAUSAL.values(), ids=CAUSAL)
def test_equals_loops_gradients_too(grid: Grid) -> None:
    cable = make()
    x = torch.randn(2, grid.key.length, DIM, dtype=torch.float64)
    grid = replace(grid, key=cable.observe(x, grid.key))
    q = torch.zeros(2, HEADS, grid.query.length, 8, dtype=torch.float64)
    got = cable(q, q, grid, scale=1.0).masked_fill(~grid.visible, 0.0)
    expected = by_loops(cable, x, grid)
    agree_with_gradients(got, expected, list(cable.parameters()))


def by_loops(cable: Cable, x: Tensor, grid: Grid) -> Tensor:
    output = x.new_zeros(x.shape[0], HEADS, grid.query.length, grid.key.length)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in output.shape)).tolist():
        seen = grid.visible[min(b, len(grid.visible) - 1), 0, i]
        if not seen[j]:
            continue
        # All these grids hold keys by order: what is seen after j lies between.
        for t in range(j + 1, grid.key.length):
            if seen[t]:
                number = cable.gate.weight[h] @ x[b, t] + cable.gate.bias[h]
                output[b, h, i, j] = output[b, h, i, j] - torch.log1p(torch.exp(number))
    return output


def test_a_number_by_hand() -> None:
    # A gate of 0 is a length of log 2: four tokens on, four of them.
    cable = Cable(dim=2, heads=1)
    with torch.no_grad():
        cable.gate.weight.zero_()
    key = cable.observe(torch.randn(1, 5, 2), Layout.sequence(5))
    grid = Grid(key, key, causal=True)
    zero = torch.zeros(1, 1, 5, 1)
    assert cable(zero, zero, grid, scale=1.0)[0, 0, 4, 0].item() == pytest.approx(-4 * math.log(2))
