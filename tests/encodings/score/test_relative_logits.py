"""Relative logits against loops and against transformers' Inkling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingAttention

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.relative_logits import RelativeLogits, relative_logits
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn

CONFIG = InklingTextConfig(
    hidden_size=24,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    swa_num_attention_heads=6,
    swa_num_key_value_heads=3,
    swa_head_dim=4,
    d_rel=5,
    rel_extent=7,
    sliding_window_size=4,
    log_scaling_n_floor=5,
    log_scaling_alpha=0.7,
    layer_types=["hybrid", "hybrid_sliding"],
    num_hidden_layers=2,
    attn_implementation="eager",
)


def make(floor: float | None = None, extent: int = 3) -> Encoding:
    torch.manual_seed(0)
    encoding = relative_logits(dim=12, heads=6, width=4, extent=extent, floor=floor, alpha=0.7)
    for parameter in encoding.double().requires_grad_(False).parameters():
        parameter.normal_()
    return encoding


def inside(encoding: Encoding) -> RelativeLogits:
    """The score part without its temperature."""
    score = getattr(encoding.score, "inner", encoding.score)
    assert isinstance(score, RelativeLogits)
    return score


@pytest.mark.parametrize(("grid", "extent", "floor"), in_turn(2, GRIDS, [1, 3, 100], [None, 2.5]))
def test_equals_loops(grid: Grid, extent: int, floor: float | None) -> None:
    q, k, v = inputs(grid)
    encoding = make(floor, extent)
    x = torch.randn(2, grid.query.length, 12, dtype=torch.float64)
    mixtures = (x @ inside(encoding).project.weight.T).view(2, -1, 6, 4).transpose(1, 2)

    def logit(row: Tensor, key: Tensor, h: int, at: float, to: float) -> Tensor:
        query, mixture = row[:8], row[8:]
        total = query @ key * 8**-0.5
        back = round(at - to)
        if 0 <= back < extent:
            total = total + mixture @ inside(encoding).profiles[:, back]
        return total if floor is None else total * (1 + 0.7 * math.log(max(1, (at + 1) / floor)))

    expected = attention_by_loops(torch.cat([q, mixtures], -1), k, v, grid, logit=logit)
    observed = replace(grid, query=encoding.observe(x, grid.query))
    torch.testing.assert_close(attend(q, k, v, observed, encoding), expected)


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "sliding"])
def test_equals_transformers(layer: int) -> None:
    """Values and gradients of its attention, without its short convolutions."""
    torch.manual_seed(1)
    theirs = InklingAttention(CONFIG, layer).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    for convolution in (theirs.k_sconv, theirs.v_sconv):
        convolution.forward = lambda x, **options: x
    sliding = theirs.is_sliding
    window = CONFIG.sliding_window_size if sliding else None
    ours = relative_logits(
        dim=24, heads=6, width=5, extent=theirs.rel_extent, floor=None if sliding else 5, alpha=0.7
    ).double()
    with torch.no_grad():
        inside(ours).project.weight.copy_(theirs.r_proj.weight)
        inside(ours).profiles.copy_(theirs.rel_logits_proj.proj)
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    grid = Grid.of(ours.observe(x, Layout.sequence(12)), causal=True, window=window)
    mask = torch.zeros(12, 12, dtype=torch.float64).masked_fill(~grid.visible, -torch.inf)
    expected, _ = theirs(x, mask)

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, theirs.head_dim))

    q, k = theirs.q_norm(heads(theirs.q_proj(x))), theirs.k_norm(heads(theirs.k_proj(x)))
    q, k, v = (y.transpose(1, 2) for y in (q, k, heads(theirs.v_proj(x))))
    output = attend(q, k, v, grid, ours, scale=1 / theirs.head_dim)
    got = theirs.o_proj(output.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=3e-6)  # norms are in float32
    weights = torch.randn_like(got)
    (a,) = torch.autograd.grad((expected * weights).sum(), theirs.rel_logits_proj.proj)
    (b,) = torch.autograd.grad((got * weights).sum(), inside(ours).profiles)
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-4)  # softmax too


def test_a_number_by_hand() -> None:
    # Two tokens, x = 1, W = 1, q = 0, floor 1 and alpha 1: the second token's τ is 1 + ln 2. Its
    # logits are τ · P = 0 for itself and τ · ln 3 / τ for the first.
    encoding = relative_logits(dim=1, heads=1, width=1, extent=2, floor=1.0, alpha=1.0)
    with torch.no_grad():
        inside(encoding).project.weight.fill_(1.0)
        inside(encoding).profiles.copy_(torch.tensor([[0.0, math.log(3) / (1 + math.log(2))]]))
    grid = Grid.of(encoding.observe(torch.ones(1, 2, 1), Layout.sequence(2)), causal=True)
    zero, values = torch.zeros(1, 1, 2, 1), torch.tensor([8.0, 4.0]).view(1, 1, 2, 1)
    output = attend(zero, zero, values, grid, encoding)
    assert output.flatten().tolist() == pytest.approx([8.0, 7.0])


def test_temperature_of_far_positions_in_half_precision() -> None:
    """bfloat16 cannot tell 2^20 from 2^20 + 4,096; τ is computed in float32."""
    encoding = make(1000.0).bfloat16()
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    grid = Grid(Layout.sequence(1, start=2**20 + 4095), Layout.sequence(1))
    scaled, _ = encoding.query_key(q, q, grid)
    assert scaled.item() == pytest.approx(1 + 0.7 * math.log((2**20 + 4096) / 1000), rel=1e-6)
