"""GRAPE's multiplicative form against matrix exponentials."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.grape_multiplicative import GrapeMultiplicative
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs


def make(width: int = 8) -> GrapeMultiplicative:
    torch.manual_seed(3)
    grape = GrapeMultiplicative(head_dim=width).double()
    with torch.no_grad():
        grape.skew.normal_()
        grape.log_frequencies.add_(0.3 * torch.randn(width // 2))
    return grape


def generator(grape: GrapeMultiplicative) -> Tensor:
    """``Σ_t θ_t (b_t a_tᵀ - a_t b_tᵀ)``, whose exponential turns a towards b."""
    planes = grape.planes(like=grape.skew)
    half = grape.head_dim // 2
    total = torch.zeros_like(planes)
    for t in range(half):
        a, b = planes[:, t], planes[:, t + half]
        total = total + grape.log_frequencies[t].exp() * (torch.outer(b, a) - torch.outer(a, b))
    return total


def exponentials(x: Tensor, positions: Tensor, generator: Tensor) -> Tensor:
    """``exp(p L) x``, one token at a time."""
    output = torch.empty_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[2]):
            at = float(positions[min(b, len(positions) - 1), i, 0])
            output[b, :, i] = x[b, :, i] @ torch.linalg.matrix_exp(at * generator).mT
    return output


@pytest.mark.parametrize("name", [name for name in GRIDS if name != "far away"])
def test_equals_exponentials(name: str) -> None:
    grape, grid = make(), GRIDS[name]
    q, k, v = inputs(grid)
    turn = generator(grape)
    expected = attention_by_loops(
        exponentials(q, grid.query.positions, turn),
        exponentials(k, grid.key.positions, turn),
        v,
        grid,
    )
    got = attend(q, k, v, grid, Encoding(query_key=grape))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_number_by_hand() -> None:
    # One plane, a quarter turn a token: (1, 0) · G(-1) (0, 1) = 1.
    grape = GrapeMultiplicative(head_dim=2).double()
    with torch.no_grad():
        grape.log_frequencies.fill_(math.log(math.pi / 2))
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    k = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 2)
    turned, other = grape(q, k, Grid(Layout.sequence(1, start=5), Layout.sequence(1, start=4)))
    assert (turned @ other.mT).item() == pytest.approx(1.0, rel=1e-6)


def test_starts_as_rope() -> None:
    grid = GRIDS["causal"]
    q, k, v = inputs(grid)
    fresh = posenc.create("grape_multiplicative", head_dim=8)
    torch.testing.assert_close(
        attend(q, k, v, grid, fresh),
        attend(q, k, v, grid, posenc.create("rope", head_dim=8)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_planes_are_orthogonal_and_norms_kept() -> None:
    grape = make()
    planes = grape.planes(like=grape.skew)
    torch.testing.assert_close(planes.mT @ planes, torch.eye(8, dtype=torch.float64))
    q = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    turned, _ = grape(q, q, Grid.of(Layout.sequence(3, start=70)))
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
