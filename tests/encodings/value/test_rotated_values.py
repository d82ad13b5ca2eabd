"""Rotated values against loops and against transformers' DeepSeek-V4."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention import BACKENDS, LayerCache
from posenc.errors import ArgumentError, BackendRefusal
from posenc.testing.oracles import rotate_by_loops
from tests.encodings.grids import GRIDS, agree_with_gradients, inputs


def make(name: str = "rotated_values", **options: object) -> Encoding:
    return posenc.create(name, heads=6, head_dim=8, **options)


def rotated(x: Tensor, angle: float, base: float) -> Tensor:
    """One vector with its pairs of neighbours rotated by ``angle`` times RoPE's frequencies."""
    turned = []
    for t in range(len(x) // 2):
        phase = angle * base ** (-2 * t / len(x))
        a, b = x[2 * t], x[2 * t + 1]
        turned.append(a * math.cos(phase) - b * math.sin(phase))
        turned.append(a * math.sin(phase) + b * math.cos(phase))
    return torch.stack(turned)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid) -> None:
    """``Σ_j a_ij R(p_j - p_i) v_j``, pair by pair, with gradients of the values."""
    q, k, v = inputs(grid, heads=2)
    v.requires_grad_()
    encoding = make(base=50.0, pairing="adjacent")
    weights = attend(q, k, torch.eye(k.shape[2]).double().expand(2, 1, -1, -1), grid, Encoding())
    rows = []
    for b in range(2):
        for h in range(2):
            for i in range(q.shape[2]):
                total = torch.zeros(8, dtype=torch.float64)
                for j in range(k.shape[2]):
                    at, to = (
                        side.positions[min(b, side.positions.shape[0] - 1), index, 0].item()
                        for side, index in ((grid.query, i), (grid.key, j))
                    )
                    total = total + weights[b, h, i, j] * rotated(v[b, 0, j], to - at, 50.0)
                rows.append(total)
    expected = torch.stack(rows).view(2, 2, -1, 8)
    agree_with_gradients(attend(q, k, v, grid, encoding), expected, [v])


def test_by_hand() -> None:
    """A query a quarter turn after its only key, of (1, 0): it gets (0, -1)."""
    encoding = posenc.create("rotated_values", head_dim=2)
    grid = Grid(Layout.at(torch.tensor([math.pi / 2])), Layout.sequence(1))
    x = torch.ones(1, 1, 1, 2)
    output = attend(x, x, torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), grid, encoding)
    assert output.flatten().tolist() == pytest.approx([0.0, -1.0], abs=1e-6)


def test_equals_deepseek() -> None:
    """Output of a layer of sliding attention: its keys are its values, and the last half turns."""
    config = DeepseekV4Config(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        q_lora_rank=16,
        o_lora_rank=8,
        o_groups=2,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        sliding_window=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = DeepseekV4Attention(config, 0).requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.normal_(std=0.4)
    x, layout = torch.randn(2, 11, 32), Layout.sequence(11)
    grid = Grid.of(layout, causal=True, window=4)
    phases = torch.outer(torch.arange(11.0), 100.0 ** (-2 * torch.arange(2) / 4))[None]
    mask = torch.zeros(11, 11).masked_fill(~grid.visible, -torch.inf)
    angles = {"main": (phases.cos(), phases.sin())}
    reached = []
    theirs.o_a_proj.register_forward_pre_hook(lambda module, given: reached.append(given[0]))
    theirs(x, angles, layout.order, mask)
    q = theirs.q_b_proj(theirs.q_a_norm(theirs.q_a_proj(x))).unflatten(-1, (4, 8)).transpose(1, 2)
    q, kv = theirs.q_b_norm(q), theirs.kv_norm(theirs.kv_proj(x)).unsqueeze(1)
    options = {"base": 100.0, "pairing": "adjacent", "fraction": 0.5, "head_dim": 8}
    ours = posenc.create("rope", **options) + posenc.create("rotated_values", **options)
    q, kv = (torch.roll(y, 4, dims=-1) for y in (q, kv))  # rotated features first
    output = attend(q, kv, kv, grid, ours, sinks=theirs.sinks)
    got = torch.roll(output, -4, dims=-1).transpose(1, 2).reshape(2, 11, 2, -1)
    torch.testing.assert_close(got, reached[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rotated_values", "rope+rotated_values", "t5+rotated_values"])
def test_a_cache_holds_rotated_values(name: str) -> None:
    encoding = make(name, causal=True)
    layer = posenc.Attention(dim=48, heads=6, encoding=encoding, causal=True)
    x, cache = torch.randn(2, 9, 48), LayerCache()
    expected = layer(x, Layout.sequence(9))
    with torch.no_grad():
        parts = [layer(x[:, n : n + 1], Layout.sequence(1, n), cache=cache) for n in range(9)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)
    values = layer.value(x).view(2, 9, 6, 8).transpose(1, 2)
    turned = rotate_by_loops(values, Layout.sequence(9).positions)
    torch.testing.assert_close(cache.values.double(), turned, rtol=1e-4, atol=1e-5)


def test_every_backend_serves_it_as_it_does_the_rest() -> None:
    grid = GRIDS["causal"]
    q, k, v = (x.float() for x in inputs(grid))
    rope, both = make("rope"), make("rope+rotated_values")
    exact = attend(q, k, v, grid, both, backend="reference")
    for backend in BACKENDS:
        try:
            attend(q, k, v, grid, rope, backend=backend)
        except BackendRefusal:
            with pytest.raises(BackendRefusal):
                attend(q, k, v, grid, both, backend=backend)
        else:
            got, lse = attend(q, k, v, grid, both, backend=backend, return_lse=True)
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
            plain = attend(q, k, v, grid, rope, backend=backend, return_lse=True)[1]
            torch.testing.assert_close(lse, plain)


def test_narrower_values_than_the_part_is_made_for() -> None:
    q, k, v = inputs(grid := GRIDS["causal"])
    with pytest.raises(ArgumentError, match="head_dim=4"):
        attend(q, k, v[..., :4], grid, make())
    assert (
        attend(q, k, v[..., :4], grid, posenc.create("rotated_values", head_dim=4)).shape[-1] == 4
    )


def test_parts_assigned_later_take_effect() -> None:
    q, k, v = inputs(grid := GRIDS["causal"])
    encoding = make()
    encoding.query_key = make("rope").query_key
    torch.testing.assert_close(
        attend(q, k, v, grid, encoding), attend(q, k, v, grid, make("rope+rotated_values"))
    )
