"""Logits by length, learned and fixed, against loops and against models of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import Llama4TextConfig
from transformers.models.beam.modeling_beam import compute_attention_scaling
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.mistral_large4.modeling_mistral_large4 import (
    MistralLarge4TextSoftmaxScaling,
)

from posenc import Encoding, Grid, Layout, attend, create
from posenc.encoding.scaling import ScaledQueries, ScaledScore
from posenc.encodings.query_key.scalable_softmax import LearnedLogFactor
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import CAUSAL, agree_with_gradients, inputs

SLOPES, INTERCEPTS = (0.3, -0.2, 0.5, 1.0, 0.0, 0.1), (0.4, 1.0, 0.1, 0.0, 0.7, -0.3)


def make(name: str = "scalable_softmax", **options: object) -> Encoding:
    return create(name, heads=6, head_dim=8, causal=True, bias=True, **options).double()


def factor_of(encoding: Encoding) -> LearnedLogFactor:
    assert isinstance(encoding.query_key, ScaledQueries)
    factor = encoding.query_key.factor
    assert isinstance(factor, LearnedLogFactor)
    assert factor.intercept is not None
    with torch.no_grad():
        factor.slope.copy_(torch.tensor(SLOPES))
        factor.intercept.copy_(torch.tensor(INTERCEPTS))
    return factor


@pytest.mark.parametrize("grid", CAUSAL.values(), ids=CAUSAL)
def test_equals_loops(grid: Grid) -> None:
    """On the product and on a bias, with the gradients of s and b."""
    q, k, v = inputs(grid)
    encoding = make("scalable_softmax+alibi")
    factor = factor_of(encoding)
    slope, intercept = factor.slope, factor.intercept
    assert intercept is not None
    steepness = -create("alibi", heads=6).bias(Grid.of(Layout.sequence(2)))[0, :, 1, 0]

    def logit(a: Tensor, b: Tensor, h: int, at: float, to: float) -> Tensor:
        kappa = slope[h] * math.log(at + 1) + intercept[h]
        return kappa * (a @ b * 8**-0.5 - steepness[h] * (at - to))

    expected = attention_by_loops(q, k, v, grid, logit=logit)
    got = attend(q, k, v, grid, encoding)
    agree_with_gradients(got, expected, [slope, intercept])


def test_by_hand() -> None:
    """The 8th token with s = 1 / ln 2 and b = 1: its queries are multiplied by 4."""
    encoding = create("scalable_softmax", heads=1, bias=True)
    factor = encoding.query_key.factor
    with torch.no_grad():
        factor.slope.fill_(1 / math.log(2))
        factor.intercept.fill_(1.0)
    q = torch.ones(1, 1, 1, 8)
    scaled, kept = encoding.query_key(q, q, Grid.of(Layout.sequence(1, start=7), causal=True))
    torch.testing.assert_close(scaled, 4 * q)
    torch.testing.assert_close(kept, q)


def test_begins_at_one_on_average() -> None:
    factor = create("scalable_softmax", heads=3, length=50, bias=True).query_key.factor
    mean = factor(torch.arange(1.0, 51.0).unsqueeze(0)).mean(dim=-1)
    torch.testing.assert_close(mean, torch.ones(1, 3))
    assert create("scalable_softmax", heads=1, length=1).query_key.factor.slope.isfinite().all()


def test_two_sided_attention_counts_the_row() -> None:
    factor_of(encoding := make())
    layout = Layout.padded([7, 4])
    n = encoding.query_key.of_queries(Grid.of(layout))
    expected = [
        [s * math.log(n) + b for s, b in zip(SLOPES, INTERCEPTS, strict=True)] for n in (7, 4)
    ]
    assert n.squeeze().tolist() == [pytest.approx(row) for row in expected]


def test_equals_mistral_large() -> None:
    factor_of(encoding := make())
    theirs = MistralLarge4TextSoftmaxScaling(6).double()
    with torch.no_grad():
        theirs.scale.copy_(torch.tensor(SLOPES))
        theirs.bias.copy_(torch.tensor(INTERCEPTS))
    layout = Layout.at(torch.tensor([1.0, 2.0, 30.0, 4096.0, 2.0**20]))
    q, _, _ = inputs(grid := Grid.of(layout, causal=True))
    expected = theirs(q, layout.positions[..., 0].long(), head_dim_first=True)
    got, _ = encoding.query_key(q, q, grid)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # theirs: logarithms in float32


def test_equals_llama() -> None:
    """Outputs of a layer without RoPE, over several steps of its factor, in one pass."""
    config = Llama4TextConfig(
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
        num_hidden_layers=1,
        no_rope_layers=[0],
        attn_temperature_tuning=True,
        floor_scale=3,
        attn_scale=0.7,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = Llama4TextAttention(config, 0).double().requires_grad_(False)
    x, grid = torch.randn(2, 14, 24).double(), Grid.of(Layout.sequence(14), causal=True)
    mask = torch.zeros(14, 14, dtype=torch.float64).masked_fill(~grid.visible, -torch.inf)
    expected, _ = theirs(x, None, mask)
    q, k, v = (
        project(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        for project in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    ours = extend(Encoding(), "log_n", length=3, growth=0.7, form="llama4")
    output = attend(q, k, v, grid, ours)
    got = theirs.o_proj(output.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # theirs: factors in float32
    plain = theirs.o_proj(attend(q, k, v, grid, Encoding()).transpose(1, 2).flatten(2))
    assert (plain - expected).abs().max() > 1e-3


def ministral(positions: Tensor) -> Tensor:
    return get_llama_4_attn_scale(positions, 0.1, 8192)[0, 0, :, 0]


def llama(positions: Tensor) -> Tensor:
    return torch.tensor([1 + 0.1 * math.log1p(math.floor((p + 1) / 8192)) for p in positions[0]])


def inkling(positions: Tensor) -> Tensor:
    return torch.tensor([1 + 0.1 * math.log(max(1.0, (p + 1) / 8192)) for p in positions[0]])


@pytest.mark.parametrize(
    ("form", "expected"), [("ministral3", ministral), ("llama4", llama), ("log", inkling)]
)
def test_forms(form: str, expected: Callable[[Tensor], Tensor]) -> None:
    """Where they begin: Llama 4's one position before Ministral 3's."""
    positions = torch.tensor([[0.0, 8190.0, 8191.0, 8192.0, 16382.0, 16383.0, 2.0**20]])
    part = extend(Encoding(), "log_n", length=8192, growth=0.1, form=form).query_key
    assert isinstance(part, ScaledQueries)
    got = part.of_queries(Grid.of(Layout.at(positions), causal=True)).flatten()
    torch.testing.assert_close(got, expected(positions))


def test_equals_beam() -> None:
    """A power of 1 + n/L; by hand, 32^0.2 = 2 at the 62nd token with L = 2."""
    positions = torch.tensor([[0.0, 1.0, 2047.0, 2048.0, 2.0**20]])

    def factors(length: int, growth: float, at: Tensor) -> Tensor:
        options = {"length": length, "growth": growth, "form": "beam"}
        part = extend(Encoding(), "log_n", **options).query_key
        assert isinstance(part, ScaledQueries)
        return part.of_queries(Grid.of(Layout.at(at), causal=True))

    expected = compute_attention_scaling(positions.long())
    torch.testing.assert_close(factors(2048, 0.1, positions), expected)
    assert factors(2, 0.2, torch.tensor([61.0])).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    "name",
    ["rope+alibi+scalable_softmax", "alibi+scalable_softmax+rope", "scalable_softmax+rope+alibi"],
)
def test_all_logits_are_scaled_in_any_order(name: str) -> None:
    q, k, v = inputs(grid := CAUSAL["more keys"])
    factor_of(encoding := make(name))
    plain = create("rope+alibi", heads=6, head_dim=8)
    rotated = plain.query_key(q, k.repeat_interleave(2, 1), grid)
    logits = rotated[0] @ rotated[1].mT * 8**-0.5 + plain.score(*rotated, grid, scale=1.0)
    logits = logits * encoding.query_key.of_queries(grid)
    weights = logits.masked_fill(~grid.visible, -torch.inf).softmax(-1)
    got = attend(q, k, v, grid, encoding)
    torch.testing.assert_close(got, weights @ v.repeat_interleave(2, 1))


def test_scores_that_read_queries_survive_a_factor_of_zero() -> None:
    """Without b the factor of a single key is s ln 1 = 0, by which queries cannot be divided."""
    q, k, v = inputs(grid := CAUSAL["causal"])
    encoding = create("shaw+scalable_softmax", heads=6, head_dim=8).double()
    output = attend(q, k, v, grid, encoding, sinks=torch.zeros(6))
    assert output.isfinite().all()
    assert isinstance(encoding.score, ScaledScore)


def test_weights_without_a_softmax_are_refused() -> None:
    with pytest.raises(ArgumentError, match="softmax"):
        create("stick_breaking+scalable_softmax", heads=2)
