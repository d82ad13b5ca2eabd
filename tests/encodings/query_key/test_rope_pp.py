"""RoPE++ against complex products, a pair of tokens and of features at a time."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

from posenc import Attention, Encoding, Grid, Layout, attend, create
from posenc.attention import LayerCache
from posenc.attention.extra.linear import LinearAttention
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.query_key.rope_pp import RopePp
from posenc.extension import extend
from posenc.testing.oracles import LogitRule, attention_by_loops
from tests.encodings.grids import GRIDS, inputs


def complex_products(*, adjacent: bool = False) -> LogitRule:
    """Re or Im of Σ_t q_t k*_t exp(i (p_i - p_j) θ_t), by turns from head to head."""

    def logit(q: Tensor, k: Tensor, head: int, at: float, to: float) -> Tensor:
        width = len(q)
        total = 0j
        for t in range(width // 2):
            places = (2 * t, 2 * t + 1) if adjacent else (t, t + width // 2)
            one, other = (complex(*(x[place].item() for place in places)) for x in (q, k))
            angle = (at - to) * 10000.0 ** (-2 * t / width)
            total += one * other.conjugate() * cmath.exp(1j * angle)
        return torch.tensor((total.imag if head % 2 else total.real) / math.sqrt(width))

    return logit


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, pairing: str) -> None:
    q, k, v = inputs(grid)
    q = q[:, ::2].repeat_interleave(2, dim=1)  # a real and an imaginary head of each query
    part = RopePp(head_dim=8, pairing=pairing)  # type: ignore[arg-type]
    got = attend(q, k, v, grid, Encoding(query_key=part))
    rule = complex_products(adjacent=pairing == "adjacent")
    expected = attention_by_loops(q, k, v, grid, logit=rule)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_a_product_by_hand() -> None:
    # One pair, θ = 1, two tokens apart: Re exp(2i) = cos 2 = -0.416147, Im = sin 2 = 0.909297.
    one = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
    turned, other = RopePp(head_dim=2)(one, one, Grid(Layout.sequence(1, 5), Layout.sequence(1, 3)))
    products = (turned * other).sum(-1).flatten().tolist()
    assert products == pytest.approx([-0.416147, 0.909297], abs=1e-6)


def test_the_layer_makes_half_the_queries_keys_and_values() -> None:
    """RoPE++_EH: as many heads as RoPE, half its projections and its cache."""
    torch.manual_seed(0)
    layer = Attention(dim=32, heads=4, encoding=create("rope_pp", head_dim=8), causal=True).double()
    assert [layer.query.out_features, layer.key.out_features] == [16, 16]
    assert layer.value.out_features == 16
    assert layer.output.in_features == 32
    x, layout = torch.randn(1, 5, 32).double(), Layout.sequence(5)
    q, k, v = (p(x).view(1, 5, 2, 8).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    heads = attention_by_loops(
        q.repeat_interleave(2, dim=1), k, v, Grid.of(layout, causal=True), logit=complex_products()
    )
    expected = layer.output(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, layout), expected, atol=1e-6, rtol=1e-5)
    cache = LayerCache()
    layer(x, layout, cache=cache)
    assert cache.keys is not None
    assert cache.keys.shape == (1, 2, 5, 8)


def test_twice_the_heads_at_the_same_cache() -> None:
    """RoPE++_EC: RoPE's projections, and twice its heads."""
    layer = Attention(dim=32, heads=8, head_dim=8, encoding=create("rope_pp", head_dim=8))
    plain = Attention(dim=32, heads=4, encoding=create("rope", head_dim=8))
    for name in ("query", "key", "value"):
        assert getattr(layer, name).weight.shape == getattr(plain, name).weight.shape
    assert layer.output.in_features == 2 * plain.output.in_features
    grouped = Attention(dim=32, heads=8, head_dim=8, kv_heads=2, encoding=layer.encoding)
    assert grouped.key.out_features == 16


@pytest.mark.parametrize("merged", [False, True])
def test_one_matrix_or_three(merged: bool) -> None:
    layer = Attention(dim=32, heads=4, encoding=create("rope_pp", head_dim=8), merged=merged)
    rows = layer.merged.weight if layer.merged is not None else layer.query.weight
    assert rows.shape == (3 * 16 if merged else 16, 32)
    assert layer(torch.randn(2, 5, 32), Layout.sequence(5)).shape == (2, 5, 32)


def test_queries_of_their_own_would_be_rope() -> None:
    """Why heads must share: 90° of the query's own undo the imaginary head's."""
    grid = Grid.of(Layout.sequence(5))
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    first, second = q[:, 1:].chunk(2, dim=-1)
    undone = torch.cat([q[:, :1], torch.cat([-second, first], dim=-1)], dim=1)
    torch.testing.assert_close(RopePp(head_dim=8)(undone, k, grid), Rope(head_dim=8)(q, k, grid))


def test_wrapped_it_still_shares_queries() -> None:
    encoding = extend(create("rope_pp", head_dim=8), "log_n", length=16)
    assert Attention(dim=32, heads=4, encoding=encoding).query.out_features == 16


def test_linear_attention_shares_queries() -> None:
    layer = LinearAttention(dim=32, heads=4, encoding=create("rope_pp", head_dim=8))
    assert layer.query.out_features == layer.key.out_features == 16
    assert layer(torch.randn(2, 5, 32), Layout.sequence(5)).shape == (2, 5, 32)
