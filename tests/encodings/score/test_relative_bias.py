"""The plain clipped bias table against loops, and a number by hand."""

from __future__ import annotations

import math

import pytest
import torch

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.relative_bias import Placement, RelativeBias
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs


@pytest.mark.parametrize("placement", ["outside", "inside"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, placement: Placement) -> None:
    q, k, v = inputs(grid)
    part = RelativeBias(heads=q.shape[1], max_distance=3, placement=placement).double()
    part.requires_grad_(False)
    factor = q.shape[-1] ** -0.5 if placement == "inside" else 1.0

    def bias(h: int, b: int, at: float, to: float) -> float:
        offset = round(to - at)
        return factor * part.table[h, max(-3, min(3, offset)) + 3].item()

    expected = attention_by_loops(q, k, v, grid, bias=bias)
    got = attend(q, k, v, grid, Encoding(score=part), backend="reference")
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("placement", "logit"), [("outside", 3.0 / 2 + 1.0), ("inside", 4.0 / 2)])
def test_a_number_by_hand(placement: Placement, logit: float) -> None:
    """D = 4 and q·k = 3, b = 1: 3/√4 + 1 or (3 + 1)/√4, against a key with q·k = 0, b = 0."""
    part = RelativeBias(heads=1, max_distance=1, placement=placement)
    with torch.no_grad():
        part.table.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
    q = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]).view(1, 1, 2, 4)
    k = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).view(1, 1, 2, 4)
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    got = attend(q, k, v, Grid.of(Layout.sequence(2), causal=True), Encoding(score=part))
    assert got[0, 0, 1, 0].item() == pytest.approx(1 / (1 + math.exp(-logit)))


def test_unclipped_it_is_shaws_of_constant_queries() -> None:
    """Shaw's keys are a bias inside the scale if all queries are one vector."""
    grid, query = Grid.of(Layout.sequence(7)), torch.randn(8)
    shaw = posenc.create("shaw", head_dim=8, max_distance=4).score
    part = RelativeBias(heads=1, max_distance=4, placement="inside")
    assert shaw is not None
    q, k = query.expand(1, 1, 7, 8), torch.randn(1, 1, 7, 8)
    with torch.no_grad():
        part.table.copy_((shaw.table.rows @ query)[None])  # type: ignore[union-attr, operator]
    torch.testing.assert_close(part(q, k, grid, scale=0.3), shaw(q, k, grid, scale=0.3))
