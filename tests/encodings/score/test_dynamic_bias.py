"""Dynamic position biases against loops, and a number by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from posenc import Encoding, Grid, attend
from posenc.encodings.score.dynamic_bias import DynamicBias
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn

KINDS = {
    "plain": {},
    "log": {"log_distance": True},
    "norm": {"norm": True, "depth": 1},
    "both, deep": {"log_distance": True, "norm": True, "depth": 3},
}


def make(**options: object) -> tuple[DynamicBias, nn.Sequential]:
    """An encoding, and the same network as a plain stack of layers."""
    torch.manual_seed(5)
    made = DynamicBias(heads=6, hidden=12, **options).double()  # type: ignore[arg-type]
    layers: list[nn.Module] = []
    for hidden in made.layers:
        layers += [hidden.linear, nn.Identity() if hidden.norm is None else hidden.norm, nn.SiLU()]
    return made, nn.Sequential(*layers, made.output)


@pytest.mark.parametrize(("grid", "kind"), in_turn(2, GRIDS, KINDS))
def test_equals_loops(grid: Grid, kind: dict[str, object]) -> None:
    made, network = make(**kind)
    made.requires_grad_(False)

    def bias(h: int, b: int, at: float, to: float) -> float:
        back = at - to
        if made.log_distance:
            back = math.copysign(math.log(abs(back) + 1), back)
        return network(torch.tensor([back], dtype=torch.float64))[h].item()

    q, k, v = inputs(grid)
    sides = (replace(side, positions=side.positions.double()) for side in (grid.query, grid.key))
    grid = Grid(*sides, grid.causal, grid.window)
    found = attend(q, k, v, grid, Encoding.of(made))
    expected = attention_by_loops(q, k, v, grid, bias=bias)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("log", "offset", "expected"), [(False, -2.0, 2.0), (True, 1.0, -1.0)])
def test_a_number_by_hand(log: bool, offset: float, expected: float) -> None:
    # f = silu(x) - silu(-x) = x, of 2 for the key two before; of -log 2 one ahead, over log 2.
    made = DynamicBias(heads=1, hidden=2, depth=1, log_distance=log)
    with torch.no_grad():
        made.layers[0].linear.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        made.layers[0].linear.bias.zero_()
        made.output.weight.copy_(torch.tensor([[1.0, -1.0]]) / (math.log(2) if log else 1.0))
        made.output.bias.zero_()
    assert made.bias(torch.tensor([offset])).item() == pytest.approx(expected)


def test_drawn_anew() -> None:
    made, _ = make(norm=True)
    before = made.output.weight.clone()
    with torch.no_grad():
        made.layers[0].norm.weight.zero_()
    made.reset_parameters()
    assert not made.output.weight.equal(before)
    assert made.layers[0].norm.weight.equal(torch.ones(12).double())
