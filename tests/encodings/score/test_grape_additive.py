"""GRAPE's additive form against loops over the authors' definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout
from posenc.encodings.score.alibi import geometric_slopes
from posenc.encodings.score.grape_additive import GrapeAdditive
from tests.encodings.grids import GRIDS

CAUSAL = {name: grid for name, grid in GRIDS.items() if grid.causal}
DIM, HEADS, WIDTH = 12, 3, 4


def make() -> GrapeAdditive:
    torch.manual_seed(9)
    grape = GrapeAdditive(dim=DIM, heads=HEADS, width=WIDTH).double()
    torch.nn.init.normal_(grape.project.weight)
    return grape


def observe(grape: GrapeAdditive, grid: Grid) -> tuple[Grid, Tensor, Tensor]:
    """The grid with both sides read; the tokens of queries and keys."""
    ends, path = (
        torch.randn(2, side.length, DIM, dtype=torch.float64) for side in (grid.query, grid.key)
    )
    query, key = grape.observe(ends, grid.query), grape.observe(path, grid.key)
    return replace(grid, query=query, key=key), ends, path


def zeros(grid: Grid) -> Tensor:
    return torch.zeros(2, HEADS, grid.query.length, 8, dtype=torch.float64)


def by_loops(grape: GrapeAdditive, ends: Tensor, path: Tensor, grid: Grid) -> Tensor:
    output = ends.new_zeros(2, HEADS, grid.query.length, grid.key.length)
    slopes, half = geometric_slopes(HEADS), WIDTH // 2
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in output.shape)).tolist():
        seen = grid.visible[min(b, len(grid.visible) - 1), 0, i]
        if not seen[j]:
            continue
        weight = grape.project.weight[h * WIDTH : (h + 1) * WIDTH]
        end = weight @ ends[b, i]
        # All these grids hold keys by order: what is seen after j lies between.
        for t in range(j + 1, grid.key.length):
            if not seen[t]:
                continue
            vector = weight @ path[b, t]
            vector = vector / (vector.square().mean() + torch.finfo(torch.float32).eps).sqrt()
            angle = float(grid.key.positions[min(b, len(grid.key.positions) - 1), t, 0])
            cosine, sine = math.cos(angle), math.sin(angle)
            total = sum(
                end[e] * (vector[e] * cosine + vector[e + half] * sine)
                + end[e + half] * (vector[e + half] * cosine - vector[e] * sine)
                for e in range(half)
            )
            output[b, h, i, j] += slopes[h] * -torch.log1p(torch.exp(-total / WIDTH))
    return output


@pytest.mark.parametrize("grid", CAUSAL.values(), ids=CAUSAL)
def test_equals_loops_gradients_too(grid: Grid) -> None:
    grape = make()
    grid, ends, path = observe(grape, grid)
    got = grape(zeros(grid), zeros(grid), grid, scale=1.0).masked_fill(~grid.visible, 0.0)
    expected = by_loops(grape, ends, path, grid)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    if expected.requires_grad:
        (found,), (wanted,) = (
            torch.autograd.grad(side.sin().sum(), [grape.project.weight])
            for side in (got, expected)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_number_by_hand() -> None:
    # One head (slope 2^-8), width 2. y of the query is (2 log 3, 0); token 0 is the key, token 1
    # between stands at π with ŷ = (√2 · 1, 0) turned to (-√2, 0); the query's own token at 2π.
    grape = GrapeAdditive(dim=1, heads=1, width=2).double()
    with torch.no_grad():
        grape.project.weight.copy_(torch.tensor([[1.0], [0.0]]))
    times = Layout.at(torch.tensor([0.0, math.pi, 2 * math.pi], dtype=torch.float64))
    height = 2 * math.log(3) / math.sqrt(2)
    x = torch.tensor([[[1.0], [1.0], [height]]], dtype=torch.float64)
    layout = grape.observe(x, times)
    zero = torch.zeros(1, 1, 3, 1)
    bias = grape(zero, zero, Grid.of(layout, causal=True), scale=1.0)[0, 0, 2]
    # Products over E: -log 3 and +log 3, whose log σ are log 1/4 and log 3/4.
    expected = [2**-8 * math.log(3 / 16), 2**-8 * math.log(3 / 4), 0.0]
    assert bias.tolist() == pytest.approx(expected, rel=1e-5)


def test_with_nothing_read_it_is_alibi_of_slope_log_2() -> None:
    grape = make()
    torch.nn.init.zeros_(grape.project.weight)
    grid, _, _ = observe(grape, CAUSAL["causal"])
    got = grape(zeros(grid), zeros(grid), grid, scale=1.0)
    alibi = posenc.create("alibi", heads=HEADS).score
    expected = alibi(zeros(grid), zeros(grid), grid, scale=1.0) * math.log(2)
    seen = grid.visible.expand_as(got)
    torch.testing.assert_close(got[seen], expected.expand_as(got)[seen].double())


def test_never_rewards_distance() -> None:
    grape = make()
    grid, _, _ = observe(grape, CAUSAL["causal"])
    last = grape(zeros(grid), zeros(grid), grid, scale=1.0)[:, :, -1]
    assert (last.diff(dim=-1) > 0).all()
    assert (last[..., -1] == 0).all()
