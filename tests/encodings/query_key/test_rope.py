"""RoPE against complex multiplication in loops, and Llama's, GPT-J's and GPT-NeoX's own."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.rope import Rope
from posenc.testing.oracles import attention_by_loops, rotate_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn


@pytest.mark.parametrize(
    ("grid", "pairing", "fraction"),
    in_turn(2, GRIDS, [("half", 1.0), ("adjacent", 0.5), ("half", 0.5), ("adjacent", 1.0)]),
)
def test_equals_loops(grid: Grid, pairing: str, fraction: float) -> None:
    q, k, v = inputs(grid)
    rope = Rope(head_dim=8, pairing=pairing, fraction=fraction)  # type: ignore[arg-type]
    how = {"adjacent": pairing == "adjacent", "turned": int(8 * fraction)}
    expected = attention_by_loops(
        rotate_by_loops(q, grid.query.positions, **how),
        rotate_by_loops(k, grid.key.positions, **how),
        v,
        grid,
    )
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, expected, atol=3e-3 if "5000" in str(grid) else 1e-3, rtol=1e-3)


def test_a_pair_by_hand() -> None:
    # Head width 2 has the one angle p: at π/2 the pair (1, 0) becomes (0, 1).
    grid = Grid.of(Layout.at(torch.tensor([0.0, math.pi / 2])))
    x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
    turned, _ = Rope(head_dim=2)(x, x, grid)
    torch.testing.assert_close(turned[0, 0], torch.tensor([[1.0, 0.0], [0.0, 1.0]]))


def test_equals_gptj() -> None:
    """transformers #25199: half and adjacent pairs are not to be mixed up."""
    x = torch.randn(2, 9, 4, 16)
    sine, cosine = create_sinusoidal_positions(9, 16).chunk(2, dim=-1)
    expected = gptj_rotate(x, sine[None], cosine[None]).transpose(1, 2)
    rope = Rope(head_dim=16, pairing="adjacent")
    heads_first = x.transpose(1, 2)
    turned, _ = rope(heads_first, heads_first, Grid.of(Layout.sequence(9)))
    torch.testing.assert_close(turned, expected)
    half, _ = Rope(head_dim=16)(heads_first, heads_first, Grid.of(Layout.sequence(9)))
    assert not torch.allclose(half, expected, atol=0.1)


def test_autocast_does_not_collapse_positions() -> None:
    """diffusers #13920: an autocast matmul collapses positions from 65536 on."""
    rope = Rope(head_dim=8)
    with torch.autocast("cpu", torch.bfloat16):
        angles = rope.angles(Layout.sequence(64, start=70_000))
    assert len(angles[0, :, 0].unique()) == 64


def test_learned_frequencies_start_at_the_fixed_ones() -> None:
    x = torch.randn(1, 2, 5, 8)
    grid = Grid.of(Layout.sequence(5))
    learned = Rope(head_dim=8, learned=True)
    torch.testing.assert_close(learned(x, x, grid)[0], Rope(head_dim=8)(x, x, grid)[0])
    learned(x, x, grid)[0].sum().backward()
    assert learned.log_frequencies is not None
    assert learned.log_frequencies.grad is not None
