"""GRAPE's contextual form against loops over the authors' definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.grape_contextual import GrapeContextual
from posenc.errors import ArgumentError
from tests.encodings.grids import GRIDS, inputs

DIM, WIDTH = 12, 4


def make() -> GrapeContextual:
    torch.manual_seed(3)
    grape = GrapeContextual(dim=DIM, head_dim=WIDTH).double()
    with torch.no_grad():
        grape.gate.weight.normal_()
        grape.log_frequencies.add_(0.3 * torch.randn(WIDTH // 2))
    return grape


def phase_by_loops(grape: GrapeContextual, x: Tensor, layout: Layout, b: int, i: int) -> Tensor:
    """The lengths of the real tokens of lower order in the document of token i, summed."""
    row = min(b, len(layout.order) - 1)
    total = x.new_zeros(())
    for t in range(layout.length):
        if layout.valid is not None and not layout.valid[min(b, len(layout.valid) - 1), t]:
            continue
        if layout.document is not None and layout.document[0, t] != layout.document[0, i]:
            continue
        if layout.order[row, t] < layout.order[row, i]:
            number = (grape.gate.weight @ x[b, t] + grape.gate.bias)[0]
            total = total + torch.log1p(torch.exp(number))
    return total


def turn_by_loops(grape: GrapeContextual, vectors: Tensor, x: Tensor, layout: Layout) -> Tensor:
    rows = []
    for b in range(len(vectors)):
        for i in range(layout.length):
            phase = phase_by_loops(grape, x, layout, b, i)
            first, second = vectors[b, :, i, : WIDTH // 2], vectors[b, :, i, WIDTH // 2 :]
            angle = phase * grape.log_frequencies.exp()
            turned = (
                first * angle.cos() - second * angle.sin(),
                first * angle.sin() + second * angle.cos(),
            )
            rows.append(torch.cat(turned, dim=-1))
    return torch.stack(rows).view(len(vectors), layout.length, -1, WIDTH).transpose(1, 2)


@pytest.mark.parametrize(
    "name", ["causal", "both ways", "one token", "own positions a row", "packed", "padded"]
)
def test_equals_loops_gradients_too(name: str) -> None:
    """Documents begin anywhere: only differences within one can be told."""
    grape, layout = make(), GRIDS[name].query
    x = torch.randn(2, layout.length, DIM, dtype=torch.float64)
    grid = replace(GRIDS[name], query=grape.observe(x, layout), key=grape.observe(x, layout))
    q = torch.randn(2, 3, layout.length, WIDTH, dtype=torch.float64)
    turned, other = grape(q, q, grid)
    seen = grid.visible
    got = (turned @ other.mT).masked_fill(~seen, 0.0)
    written = turn_by_loops(grape, q, x, layout)
    expected = (written @ written.mT).masked_fill(~seen, 0.0)
    torch.testing.assert_close(got, expected)
    learned = list(grape.parameters())
    found, wanted = (
        torch.autograd.grad(side.sin().sum(), learned, allow_unused=True)
        for side in (got, expected)
    )
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if two is None else two)


def test_a_number_by_hand() -> None:
    # Lengths log 2 (a gate of 0), one pair of frequency π / (2 log 2): a quarter turn a token.
    grape = GrapeContextual(dim=1, head_dim=2).double()
    with torch.no_grad():
        grape.gate.bias.zero_()
        grape.log_frequencies.fill_(math.log(math.pi / 2 / math.log(2)))
    layout = grape.observe(torch.ones(1, 2, 1, dtype=torch.float64), Layout.sequence(2))
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 1, 2, 2)
    turned, _ = grape(q, q, Grid.of(layout))
    assert turned[0, 0, 1].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)


def test_with_lengths_of_one_it_is_rope() -> None:
    grape = GrapeContextual(dim=DIM, head_dim=8, length=1.0).double()
    grid = GRIDS["causal"]
    q, k, v = inputs(grid)
    seen = grape.observe(torch.randn(2, 7, DIM, dtype=torch.float64), grid.query)
    torch.testing.assert_close(
        attend(q, k, v, Grid.of(seen, causal=True), Encoding(query_key=grape)),
        attend(q, k, v, grid, posenc.create("rope", head_dim=8)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("length", [1e-3, 1.0, 900.0])
def test_starts_with_tokens_of_the_given_length(length: float) -> None:
    grape = GrapeContextual(dim=DIM, head_dim=8, length=length)
    signal = grape.observe(torch.randn(1, 5, DIM), Layout.sequence(5)).signal
    assert signal is not None
    torch.testing.assert_close(signal, torch.full_like(signal, length), rtol=1e-4, atol=0)


def test_joins_with_biases_but_not_with_another_reader() -> None:
    joined = posenc.create("grape_contextual+alibi", dim=DIM, heads=3, head_dim=WIDTH)
    assert len(joined.parts()) == 2
    two = posenc.create("grape_contextual+forgetting", dim=DIM, heads=3, head_dim=WIDTH)
    with pytest.raises(ArgumentError, match="at most one part"):
        two.observe(torch.randn(1, 3, DIM), Layout.sequence(3))
