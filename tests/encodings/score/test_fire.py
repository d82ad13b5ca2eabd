"""FIRE against loops over the paper's equation."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Grid, Layout
from posenc.encodings.score.fire import Fire


def by_loops(fire: Fire, grid: Grid) -> torch.Tensor:
    c, limit = fire.rate.item(), abs(fire.stretch.item() * fire.threshold)
    first, last = fire.input, fire.output
    rows = []
    for b in range(grid.offset.shape[0]):
        for i in range(grid.query.length):
            for j in range(grid.key.length):
                position = abs(float(grid.query.positions[b, i, 0]))
                distance = abs(float(grid.offset[b, i, j, 0]))
                share = math.log(c * distance + 1) / (math.log(c * max(position, limit) + 1) + 1e-6)
                hidden = (first.weight[:, 0] * share + first.bias).clamp(min=0)
                rows.append(last.weight @ hidden + last.bias)
    shape = (grid.offset.shape[0], grid.query.length, grid.key.length, -1)
    return torch.stack(rows).reshape(shape).movedim(-1, 1)


@pytest.mark.parametrize(
    "grid",
    [
        Grid.of(Layout.sequence(6), causal=True),
        Grid(Layout.sequence(3, start=700), Layout.sequence(5)),
        Grid.of(Layout.at(torch.tensor([[0.0, 0.5, 9.5], [40.0, 1.0, 2.0]]))),
    ],
)
def test_equals_loops(grid: Grid) -> None:
    fire = Fire(heads=3, threshold=20.0)
    q, k = (torch.zeros(1, 3, side.length, 8) for side in (grid.query, grid.key))
    torch.testing.assert_close(fire(q, k, grid, scale=1.0), by_loops(fire, grid))


def test_a_number_by_hand() -> None:
    # With f the identity, c = 1 and L = 3: log(1 + 1) / log(3 + 1) = 1/2.
    fire = Fire(heads=1, hidden=1, scale=1.0, threshold=3.0)
    with torch.no_grad():
        for parameter in (*fire.input.parameters(), *fire.output.parameters()):
            parameter.fill_(1.0 if parameter.dim() == 2 else 0.0)
    bias = fire.bias(torch.tensor([[2.0]]), torch.tensor([[[-1.0]]]))
    assert bias.item() == pytest.approx(0.5, rel=1e-5)


def test_is_relative_below_the_threshold_and_not_beyond() -> None:
    fire = Fire(heads=2, threshold=50.0)

    def bias(start: int) -> torch.Tensor:
        grid = Grid.of(Layout.sequence(8, start=start))
        return fire(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), grid, scale=1.0)

    torch.testing.assert_close(bias(0), bias(40))
    assert not torch.allclose(bias(0), bias(400), atol=1e-4)


def test_inputs_stay_in_the_trained_range_at_any_length() -> None:
    fire = Fire(heads=1, hidden=1, threshold=16.0)
    with torch.no_grad():
        for parameter in (*fire.input.parameters(), *fire.output.parameters()):
            parameter.fill_(1.0 if parameter.dim() == 2 else 0.0)
    positions = torch.tensor([[10.0, 1e3, 1e6]])
    share = fire.bias(positions, -positions.unsqueeze(-1))
    assert share.max().item() <= 1.0
