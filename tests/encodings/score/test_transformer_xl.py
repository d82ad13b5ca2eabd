"""Transformer-XL's logits against loops, and against its own relative shift."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encoding import BucketedTerms
from posenc.encodings.score import transformer_xl as module
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


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_many_distances_are_computed_a_piece_at_a_time(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, q = make(), torch.randn(1, 6, 20, 8, dtype=torch.float64)
    grid = Grid.of(Layout.sequence(20), causal=causal)
    found = []
    for kept in (4096, 7):
        monkeypatch.setattr(module, "KEPT", kept)
        terms = part.lower(q, q, grid, scale=0.5)
        assert terms is not None
        assert isinstance(terms[0], BucketedTerms)
        assert terms[0].left is not None
        rows = terms[0].left.rows
        found.append((rows, *torch.autograd.grad(rows.sin().sum(), part.weight)))
    torch.testing.assert_close(*found)


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
