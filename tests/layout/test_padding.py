"""Padding may hold anything, in every layer and model that knows a layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Attention, Encoding, Grid, Layout, attend
from posenc.attention.extra.complex import attend_complex
from posenc.attention.extra.linear import LinearAttention, attend_linear
from posenc.attention.extra.scoring import Additive, MultiHeadScoring
from posenc.grid import usable_signals
from posenc.layout.padding import zero_invalid
from posenc.models.block import Block, FeedForward
from posenc.registry import ENCODINGS
from posenc.testing import LAWS, LawBroken, Subject

LAYOUT = Layout.padded([6, 4], side="left")
HIDDEN = torch.tensor([[False] * 6, [True, True, False, False, False, False]])


def poisoned(*shape: int) -> tuple[Tensor, Tensor]:
    """A tensor ``[2, 6, …]`` with zeros at padding, and the same with NaN and infinities there."""
    plain = torch.randn(2, 6, *shape).masked_fill(HIDDEN.view(2, 6, *(1 for _ in shape)), 0)
    other = plain.clone()
    other[1, 0], other[1, 1] = torch.nan, torch.inf
    return plain, other


def check(module: torch.nn.Module, compute: Callable[[Tensor], Tensor]) -> None:
    """Outputs at real tokens, and all gradients, do not depend on padding."""
    results = []
    for x in poisoned(16):
        module.zero_grad()
        x.requires_grad_()
        output = compute(x).masked_fill(HIDDEN.unsqueeze(-1), 0)
        output.square().sum().backward()
        assert x.grad is not None
        results.append([output, x.grad, *(p.grad for p in module.parameters())])
        assert not x.grad[HIDDEN].any()
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, atol=0, rtol=0)


@pytest.mark.parametrize("merged", [False, True])
def test_attention_layers(merged: bool) -> None:
    encoding = posenc.create("forgetting", dim=16, heads=2)
    layer = Attention(dim=16, heads=2, encoding=encoding, causal=True, merged=merged)
    check(layer, lambda x: layer(x, LAYOUT))


def test_the_context_of_cross_attention() -> None:
    layer = Attention(dim=16, heads=2, encoding=posenc.create("rope", head_dim=8))
    queries = torch.randn(2, 6, 16)
    check(layer, lambda x: layer(queries, Layout.sequence(6), context=x, context_layout=LAYOUT))


@pytest.mark.parametrize("norm_first", [False, True])
def test_blocks(norm_first: bool) -> None:
    attention = Attention(dim=16, heads=2, encoding=posenc.create("alibi", heads=2))
    feed_forward = FeedForward(dim=16, hidden=32)
    block = Block(dim=16, attention=attention, feed_forward=feed_forward, norm_first=norm_first)
    check(block, lambda x: block(x, LAYOUT))


def test_linear_attention() -> None:
    layer = LinearAttention(dim=16, heads=2, encoding=posenc.create("rope", head_dim=8))
    check(layer, lambda x: layer(x, LAYOUT))
    q, k, v = (poisoned(2, 8)[1].transpose(1, 2) for _ in range(3))
    output = attend_linear(q, k, v, Grid.of(LAYOUT), Encoding(), features="softmax")
    assert output.isfinite().all()


def test_complex_attention() -> None:
    q, k, v = (poisoned(2, 8)[1].transpose(1, 2) for _ in range(3))
    given = [torch.complex(x, x.flip(-1)) for x in (q, k, v)]
    for product in ("real", "modulus"):
        output = attend_complex(*given, Grid.of(LAYOUT), Encoding(), product=product)
        assert torch.view_as_real(output).isfinite().all()


def test_scoring_of_lengths() -> None:
    layer = MultiHeadScoring(
        dim=16,
        heads=2,
        score=lambda width, heads: Additive(query_dim=width, key_dim=width, hidden=4, heads=heads),
    )
    queries, lengths = torch.randn(2, 6, 16), torch.tensor([6, 4])
    results = []
    for x in poisoned(16):
        layer.zero_grad()
        keys = x.flip(1)
        output = layer(queries, keys, keys, lengths=lengths)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in layer.parameters())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, atol=0, rtol=0)


def test_a_cache_of_memory_that_nobody_has_written() -> None:
    """A buffer of the largest length, its unused tail marked invalid."""
    layout = Layout(
        torch.arange(8.0).view(1, 8, 1),
        torch.arange(8).unsqueeze(0),
        valid=(torch.arange(8) < 5).unsqueeze(0),
    )
    encoding, query = posenc.create("cope", head_dim=8), torch.randn(1, 2, 1, 8)
    k, v = (torch.full((1, 2, 8, 8), torch.nan) for _ in range(2))
    for x in (k, v):
        x[:, :, :5] = torch.randn(1, 2, 5, 8)
    grid = Grid(Layout.sequence(1, 4), layout, causal=True)
    plain = Grid(Layout.sequence(1, 4), Layout.sequence(5), causal=True)
    expected = attend(query, k[:, :, :5], v[:, :, :5], plain, encoding)
    torch.testing.assert_close(attend(query, k, v, grid, encoding), expected)


def test_it_costs_nothing_without_padding() -> None:
    x, layout = torch.randn(1, 3, 4), Layout.sequence(3)
    assert zero_invalid(x, layout) is x
    grid = Grid.of(layout)
    assert usable_signals(grid) is grid


@pytest.mark.parametrize("name", ["rope", "cope", "fire"])
def test_the_law_bites(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posenc.attention.call.zero_invalid", lambda x, layout, *, dim: x)
    with pytest.raises(LawBroken, match=r"invalid_tokens_hold_anything: .* is off by nan"):
        LAWS["invalid_tokens_hold_anything"](Subject.of_entry(name, ENCODINGS[name]))


def test_positions_of_an_attention_mask_count_its_real_tokens() -> None:
    layout = Layout.from_attention_mask(torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    assert layout.positions[..., 0].tolist() == [[0.0, 0.0, 1.0, 2.0], [0.0, 1.0, 0.0, 0.0]]
