"""PoPE against its sum of cosines, a feature at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from posenc import Encoding, Grid, Layout, attend, create_layers
from posenc.encodings.query_key.pope import Pope
from tests.encodings.grids import GRIDS, inputs


def scores(q: Tensor, k: Tensor, grid: Grid, phase: Tensor) -> Tensor:
    """Σ_c softplus(q_c) softplus(k_c) cos((p_j - p_i) θ_c + δ_c), grouped keys repeated."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    rows = []
    for h in range(q.shape[1]):
        total = torch.zeros((), dtype=torch.float64)
        for c in range(q.shape[-1]):
            theta = 10000.0 ** (-c / q.shape[-1])
            angle = grid.offset[..., 0].double() * theta + phase[h, c].double()
            product = softplus(q[:, h, :, None, c]) * softplus(k[:, h, None, :, c])
            total = total + product * angle.cos()
        rows.append(total)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid) -> None:
    q, k, v = inputs(grid)
    pope = Pope(heads=6, head_dim=8, initial="uniform")
    logits = scores(q, k, grid, pope.phase) / 8**0.5
    weights = logits.masked_fill(~grid.visible, -1e300).softmax(-1) * grid.visible
    expected = weights @ v.repeat_interleave(2, dim=1)
    got = attend(q, k, v, grid, Encoding(query_key=pope))
    torch.testing.assert_close(got, expected, atol=3e-3, rtol=1e-3)


def test_a_product_by_hand() -> None:
    # One feature has θ = 1. softplus(0) = ln 2. Three tokens apart the product is (ln 2)² cos 3.
    zero = torch.zeros(1, 1, 1, 1)
    turned, other = Pope(heads=1, head_dim=1)(
        zero, zero, Grid(Layout.sequence(1, 4), Layout.sequence(1, 1))
    )
    assert (turned * other).sum().item() == pytest.approx(math.log(2) ** 2 * math.cos(3), abs=1e-6)


def test_phases_stay_within_a_turn() -> None:
    pope = Pope(heads=1, head_dim=2)
    x, grid = torch.randn(1, 1, 3, 2), Grid.of(Layout.sequence(3))
    at_zero = pope(x, x, grid)[1]
    with torch.no_grad():
        pope.phase.fill_(5.0)
    torch.testing.assert_close(pope(x, x, grid)[1], at_zero)
    with torch.no_grad():
        pope.phase.fill_(-50.0)
    torch.testing.assert_close(pope(x, x, grid)[1], at_zero, atol=1e-5, rtol=1e-5)


def test_initial_phases() -> None:
    assert Pope(heads=3, head_dim=8).phase.eq(0).all()
    drawn = Pope(heads=3, head_dim=8, initial="uniform").phase
    assert drawn.max() <= 0
    assert -2 * math.pi <= drawn.min() < -3
    first, second = create_layers("pope", layers=2, dim=16, heads=2)
    assert first.query_key is not second.query_key


def test_the_scale_is_that_of_the_head() -> None:
    assert Encoding(query_key=Pope(heads=1, head_dim=16)).default_scale(16) == 0.25
