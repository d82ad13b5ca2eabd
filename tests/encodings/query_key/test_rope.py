"""RoPE against complex multiplication in loops, and Llama's, GPT-J's, GPT-NeoX's and ESM-2's."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import EsmConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.esm.modeling_esm import EsmRotaryEmbedding, EsmSelfAttention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotate
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotate

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


def test_equals_llama() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    positions = torch.arange(3, 53).unsqueeze(0)
    q, k = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    cosine, sine = LlamaRotaryEmbedding(config)(q, positions)
    expected = llama_rotate(q, k, cosine, sine)
    grid = Grid.of(Layout.sequence(50, start=3))
    torch.testing.assert_close(Rope(head_dim=16)(q, k, grid), tuple(expected))


def test_equals_neox_with_a_fraction() -> None:
    """Liger #1451: partial rotation turns the first features, and leaves the rest alone."""
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4)
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    cosine, sine = GPTNeoXRotaryEmbedding(config)(q, torch.arange(9).unsqueeze(0))
    expected = neox_rotate(q, k, cosine, sine)
    rope = Rope(head_dim=16, fraction=0.25)
    torch.testing.assert_close(rope(q, k, Grid.of(Layout.sequence(9))), tuple(expected))


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


def test_equals_esm() -> None:
    """ESM-2 scales queries before it rotates them."""
    options = {"hidden_size": 48, "num_attention_heads": 3, "attention_probs_dropout_prob": 0.0}
    config = EsmConfig(**options, vocab_size=9, position_embedding_type="rotary")
    config._attn_implementation = "eager"
    theirs = EsmSelfAttention(config).requires_grad_(False)
    x, layout = torch.randn(2, 40, 48), Layout.sequence(40)
    rotation = EsmRotaryEmbedding(config)(x, torch.arange(40).unsqueeze(0))
    expected, _ = theirs(x, position_embeddings=rotation)
    q, k, v = (
        project(x).unflatten(-1, (3, 16)).transpose(1, 2)
        for project in (theirs.query, theirs.key, theirs.value)
    )
    rope = Encoding(query_key=Rope(head_dim=16))
    got = attend(q, k, v, Grid.of(layout), rope).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, expected)


def test_products_of_like_tokens_fade_with_distance() -> None:
    rope = Rope(head_dim=64)
    one = torch.ones(1, 1, 1, 64)
    keys = one.expand(1, 1, 400, 64)
    turned, others = rope(one, keys, Grid(Layout.sequence(1), Layout.sequence(400)))
    product = (turned @ others.mT).flatten()
    means = [product[a : a + 50].mean().item() for a in (0, 100, 300)]
    assert means[0] > means[1] > means[2]


def test_angles_stay_exact_in_bfloat16() -> None:
    """transformers #29285, gpt-neox #1003: bf16 positions and frequencies collide."""
    rope = Rope(head_dim=64).bfloat16()
    angles = rope.angles(Layout.sequence(4096))
    assert angles.dtype == torch.float32
    exact = torch.arange(4096.0, dtype=torch.float64).unsqueeze(-1) * torch.pow(
        10000.0, -torch.arange(0, 64, 2, dtype=torch.float64) / 64
    )
    assert ((angles[0] - exact) / 2).sin().abs().max().item() < 2e-7
    assert len(angles[0, :, 0].unique()) == 4096


def test_autocast_does_not_collapse_positions() -> None:
    """diffusers #13920: an autocast matmul collapses positions from 65536 on."""
    rope = Rope(head_dim=8)
    with torch.autocast("cpu", torch.bfloat16):
        angles = rope.angles(Layout.sequence(64, start=70_000))
    assert len(angles[0, :, 0].unique()) == 64


def test_half_inputs_come_back_half() -> None:
    """timm #2794: rotation silently upcasts half inputs."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(1, 2, 5, 8).to(dtype)
        for turned in Rope(head_dim=8)(x, x, Grid.of(Layout.sequence(5))):
            assert turned.dtype == dtype


def test_double_backward() -> None:
    """rotary-embedding-torch #18."""
    rope = Rope(head_dim=4, learned=True).double()
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    grid = Grid.of(Layout.sequence(3))
    torch.autograd.gradgradcheck(lambda x: rope(x, x, grid)[0], (x,))


def test_one_head() -> None:
    """Liger #342: a single head."""
    x = torch.randn(1, 1, 3, 8)
    assert Rope(head_dim=8)(x, x, Grid.of(Layout.sequence(3)))[0].shape == x.shape
