"""p-RoPE against loops and transformers' proportional RoPE."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotate

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.p_rope import PRope
from posenc.encodings.query_key.rope import Rope
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.encodings.image_grids import rotate_axes_by_loops


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, pairing: str) -> None:
    q, k, v = inputs(grid)

    def angle(head: int, pair: int, at: list[float]) -> float:
        return at[0] * 10000 ** (-2 * pair / 8) if pair < 3 else 0.0

    turned = [
        rotate_axes_by_loops(x, side, angle, adjacent=pairing == "adjacent")
        for x, side in ((q, grid.query), (k, grid.key))
    ]
    rope = PRope(head_dim=8, pairing=pairing)  # type: ignore[arg-type]
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, attention_by_loops(*turned, v, grid), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("p", [0.25, 0.3, 0.75])
def test_equals_transformers(p: float) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    config.rope_parameters = {
        "rope_type": "proportional",
        "rope_theta": 500000.0,
        "partial_rotary_factor": p,
    }
    q = torch.randn(2, 4, 50, 16, requires_grad=True)
    k = torch.randn(2, 2, 50, 16, requires_grad=True)
    cosine, sine = LlamaRotaryEmbedding(config)(q, torch.arange(3, 53).unsqueeze(0))
    expected = llama_rotate(q, k, cosine, sine)
    got = PRope(head_dim=16, p=p, base=500000.0)(q, k, Grid.of(Layout.sequence(50, start=3)))
    torch.testing.assert_close(got, tuple(expected))
    gradients = [
        torch.autograd.grad([x.sin().sum() for x in both], (q, k)) for both in (got, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_all_and_nothing() -> None:
    """p = 1 is RoPE, p = 0 is NoPE."""
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    grid = Grid.of(Layout.sequence(5, start=9))
    expected = Rope(head_dim=8)(q, k, grid)
    torch.testing.assert_close(PRope(head_dim=8, p=1.0)(q, k, grid), expected)
    torch.testing.assert_close(PRope(head_dim=8, p=0.0)(q, k, grid), (q, k))


def test_it_is_not_a_fraction_of_the_head() -> None:
    """coreai #66: a head's first half turned is not the fast half of its pairs turned."""
    x, grid = torch.randn(1, 1, 4, 8), Grid.of(Layout.sequence(4))
    proportional, _ = PRope(head_dim=8, p=0.5)(x, x, grid)
    first_half, _ = Rope(head_dim=8, fraction=0.5)(x, x, grid)
    moved = [(y - x).abs().amax((0, 1, 2)) > 1e-3 for y in (proportional, first_half)]
    assert moved[0].tolist() == [True, True, False, False] * 2
    assert moved[1].tolist() == [True] * 4 + [False] * 4
