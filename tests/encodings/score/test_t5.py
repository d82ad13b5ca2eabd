"""T5's bias against loops in integers and against the T5 model's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.t5 import T5, log_boundaries
from posenc.testing.oracles import attention_by_loops, t5_bucket_by_loops
from tests.encodings.grids import GRIDS, inputs

# Bidirectional distances 0 … 30, from the published table of buckets.
PUBLISHED = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 9, 9, 9] + [10] * 7 + [11] * 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, causal: bool) -> None:
    grid = replace(grid, causal=causal)
    q, k, v = inputs(grid)
    t5 = T5(heads=6, causal=causal).double().requires_grad_(False)

    def bias(h: int, b: int, at: float, to: float) -> float:
        distance = int(to - at)  # towards zero, as a distance's integer part
        if to > at and not causal and distance == 0:
            return t5.table[h, 16].item()
        return t5.table[h, t5_bucket_by_loops(distance, causal=causal)].item()

    expected = attention_by_loops(q, k, v, grid, bias=bias)
    got = attend(q, k, v, grid, Encoding(score=t5), backend="reference")
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_published_buckets() -> None:
    buckets = T5(heads=1).bucket(-torch.arange(31.0).unsqueeze(-1)).tolist()
    assert buckets == PUBLISHED
    assert T5(heads=1).bucket(torch.tensor([[1e6], [-1e6]])).tolist() == [31, 15]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 20), (64, 1000)])
def test_every_bucket_against_integers(causal: bool, count: int, most: int) -> None:
    t5 = T5(heads=1, causal=causal, buckets=count, max_distance=most)
    distances = range(-2 * most, 2 * most)
    expected = [
        t5_bucket_by_loops(d, causal=causal, buckets=count, max_distance=most) for d in distances
    ]
    offsets = torch.tensor(distances, dtype=torch.float32).unsqueeze(-1)
    assert t5.bucket(offsets).tolist() == expected


def test_distances_on_a_log_boundary_do_not_slip() -> None:
    """FIELD: 16, 32 and 64 lie exactly on boundaries; a logarithm one ulp low moves them."""
    boundaries = log_boundaries(16, 128)
    assert {16, 32, 64} <= set(boundaries)
    assert log_boundaries(32, 128)[:16] == tuple(range(1, 17))


@pytest.mark.parametrize("decoder", [False, True])
def test_equals_transformers(decoder: bool) -> None:
    config = T5Config(num_heads=3, d_model=24, d_kv=8, is_decoder=decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    weight = theirs.relative_attention_bias.weight.detach()
    ours = T5(heads=3, causal=decoder)
    with torch.no_grad():
        ours.table.copy_(weight.T)
    q, k = torch.zeros(1, 3, 40, 8), torch.zeros(1, 3, 300, 8)
    grid = Grid(Layout.sequence(40, start=0), Layout.sequence(300))
    expected = theirs.compute_bias(40, 300)
    torch.testing.assert_close(ours(q, k, grid, scale=1.0), expected)


def test_a_learned_bias_gets_the_gradient_of_all_its_pairs() -> None:
    """attention-gym #20: gradients of learned biases."""
    t5 = T5(heads=1, buckets=4, max_distance=5, causal=True)
    grid = Grid.of(Layout.sequence(4), causal=True)
    q = torch.zeros(1, 1, 4, 2)
    (t5(q, q, grid, scale=1.0) * grid.visible).sum().backward()
    # Distance 0 four times, 1 three, then 2 and 3 share the log buckets from 2 and from 4 on.
    assert t5.table.grad is not None
    assert t5.table.grad[0].tolist()[:2] == [4.0, 3.0]
    assert t5.table.grad.sum().item() == 10.0
