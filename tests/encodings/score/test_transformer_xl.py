"""Transformer-XL's logits against loops, and against its own relative shift."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encoding import LowRank
from posenc.encodings.score.transformer_xl import TransformerXL
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs


def make(*, dim: int = 10, heads: int = 6, head_dim: int = 8) -> TransformerXL:
    torch.manual_seed(2)
    part = TransformerXL(dim=dim, heads=heads, head_dim=head_dim).double()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(std=0.5)
    return part


def wave(distance: float, dim: int) -> Tensor:
    angles = [distance / 10000 ** (2 * t / dim) for t in range(dim // 2)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid) -> None:
    q, k, v = inputs(grid)
    part = make().requires_grad_(False)
    u, w = part.biases.content, part.biases.position

    def logit(query: Tensor, key: Tensor, h: int, at: float, to: float) -> Tensor:
        content = (query + u[h]) @ key
        return (content + (query + w[h]) @ part.weight[h] @ wave(at - to, 10)) / math.sqrt(8)

    expected = attention_by_loops(q, k, v, grid, logit=logit)
    got = attend(q, k, v, grid, Encoding(score=part), backend="reference")
    torch.testing.assert_close(got, expected)


def test_a_number_by_hand() -> None:
    # Widths D = 1, C = 2: r(x) = (sin x, cos x). q = 2, k = 3, u = 4, w = 5, W = (6, 7).
    part = make(dim=2, heads=1, head_dim=1)
    with torch.no_grad():
        part.biases.content.fill_(4.0)
        part.biases.position.fill_(5.0)
        part.weight.copy_(torch.tensor([[[6.0, 7.0]]]))
    q, k = torch.tensor([[[[2.0]]]]).double(), torch.tensor([[[[3.0]]]]).double()
    grid = Grid(Layout.sequence(1, start=3), Layout.sequence(1, start=1))
    # The product q·k is attention's own; u·k = 12; (2 + 5) · (6 sin 2 + 7 cos 2).
    expected = 12 + 7 * (6 * math.sin(2) + 7 * math.cos(2))
    assert part(q, k, grid, scale=1.0).item() == pytest.approx(expected)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 8), (1, 6), (7, 7)])
def test_equals_its_own_relative_shift(queries: int, keys: int) -> None:
    """Distances K-1 … 0, a zero column in front, and a reshape: right wherever j ≤ i."""
    part = make().requires_grad_(False)
    grid = Grid(Layout.sequence(queries, start=keys - queries), Layout.sequence(keys), causal=True)
    q, k, _ = inputs(grid)
    k = k.repeat_interleave(2, dim=1)
    rows = torch.stack([wave(keys - 1 - n, 10) for n in range(keys)]) @ part.weight.mT
    products = (q + part.biases.position.unsqueeze(1)) @ rows.mT
    padded = torch.cat([products.new_zeros(2, 6, queries, 1), products], dim=-1)
    shifted = padded.reshape(2, 6, keys + 1, queries)[:, :, 1:].reshape(2, 6, queries, keys)
    content = (part.biases.content.unsqueeze(1) * k).sum(-1)
    expected = 0.5 * (shifted + content.unsqueeze(2))
    got = part(q, k, grid, scale=0.5)
    hidden = ~grid.visible
    torch.testing.assert_close(got.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))


def test_low_rank_on_irregular_layouts_has_the_same_gradients() -> None:
    """The sum of angles instead of one row an offset; positions get gradients too."""
    part = make()
    plain = Layout.sequence(9)
    times = plain.positions.double().requires_grad_()
    grids = (Grid.of(plain, causal=True), Grid.of(Layout.at(times), causal=True))
    q, k, v = (x.requires_grad_() for x in inputs(grids[0]))
    terms = part.lower(q, k.repeat_interleave(2, dim=1), grids[1], scale=0.3)
    assert terms is not None
    assert all(isinstance(term, LowRank) for term in terms)
    leaves = [q, k, v, *part.parameters()]
    results = []
    for grid in grids:
        output = attend(q, k, v, grid, Encoding(score=part))
        loss = output.sin().sum()
        results.append([output, *torch.autograd.grad(loss, leaves, retain_graph=True)])
    for regular, irregular in zip(*results, strict=True):
        torch.testing.assert_close(regular, irregular)
    (slope,) = torch.autograd.grad(loss, times)
    assert slope.abs().max() > 0


def test_far_positions_keep_their_accuracy() -> None:
    """Two tokens a million from the start are told apart as near it, though low rank."""
    part = make().requires_grad_(False)
    near, far = (Layout.at(torch.tensor([0.0, 1.0, 5.0]) + start) for start in (0.0, 1e6))
    q, k, _ = inputs(Grid.of(near))
    k = k.repeat_interleave(2, dim=1)
    scores = [part(q, k, Grid.of(layout), scale=1.0) for layout in (near, far)]
    torch.testing.assert_close(*scores)


def test_offsets_are_not_clipped() -> None:
    part = make().requires_grad_(False)
    q, k, _ = inputs(GRIDS["one token"])
    k = k.repeat_interleave(2, dim=1)
    scores = [
        part(q, k, Grid(Layout.sequence(1, start=at), Layout.sequence(1)), scale=1.0)
        for at in (1000, 2000, 4000)
    ]
    assert not torch.allclose(scores[0], scores[1])
    assert not torch.allclose(scores[1], scores[2])


def test_hooks_of_the_biases_are_seen_beside_kept_products() -> None:
    torch.manual_seed(0)
    encoding = posenc.create("transformer_xl", dim=16, heads=2, head_dim=8).eval()
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    grid = Grid.of(Layout.sequence(40))
    part = encoding.score
    assert isinstance(part, TransformerXL)
    with torch.no_grad():
        for _ in range(3):
            attend(q, k, v, grid, encoding, backend="blockwise")
        part.biases.register_forward_hook(lambda _, given, biases: (biases[0], 9 * biases[1]))
        for _ in range(2):
            output = attend(q, k, v, grid, encoding, backend="blockwise")
            expected = attend(q, k, v, grid, encoding, backend="reference")
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
