"""M-RoPE against loops, Qwen2-VL's (contiguous) and Qwen3-VL's (interleaved)."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb as rotate_by_halves
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.mrope import Mrope, default_sections
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import inputs
from tests.encodings.image_grids import rotate_axes_by_loops

# Two words, an image of 2×3 cells from 2 on, two words from one past its largest position.
STORY = torch.tensor(
    [[0, 0, 0], [1, 1, 1]]
    + [[2, 2 + row, 2 + column] for row in range(2) for column in range(3)]
    + [[5, 5, 5], [6, 6, 6]]
).float()
AXES = {
    "contiguous": ((2, 3, 3), [0, 0, 1, 1, 1, 2, 2, 2]),
    "interleaved": ((4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]),
}


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("arrangement", AXES)
def test_equals_loops(arrangement: str, pairing: str) -> None:
    sections, axes = AXES[arrangement]
    rows = torch.stack([STORY, 1.5 * STORY.flip(1) + 40])
    grid = Grid(Layout.at(rows[:, 4:]), Layout.at(rows))
    q, k, v = inputs(grid, width=16)

    def angle(head: int, pair: int, at: list[float]) -> float:
        return at[axes[pair]] * 1e6 ** (-2 * pair / 16)

    turned = [
        rotate_axes_by_loops(x, side, angle, adjacent=pairing == "adjacent")
        for x, side in ((q, grid.query), (k, grid.key))
    ]
    rope = Mrope(head_dim=16, sections=sections, arrangement=arrangement, pairing=pairing)  # type: ignore[arg-type]
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, attention_by_loops(*turned, v, grid), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arrangement", AXES)
def test_equals_qwen(arrangement: str) -> None:
    """Values and gradients, at the head width and sections of the published models."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    if arrangement == "contiguous":
        theirs = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**sizes))
        base = 1e6
    else:
        theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=128, **sizes))
        base = theirs.config.rope_parameters["rope_theta"]
    q = torch.randn(1, 2, 10, 128, requires_grad=True)
    k = torch.randn(1, 1, 10, 128, requires_grad=True)
    cosine, sine = theirs(q, STORY.T.unsqueeze(1))
    expected = rotate_by_halves(q, k, cosine, sine)
    mine = Mrope(head_dim=128, base=base, arrangement=arrangement)  # type: ignore[arg-type]
    assert mine.sections == tuple(theirs.mrope_section)
    got = mine(q, k, Grid.of(Layout.at(STORY.unsqueeze(0))))
    gradients = [torch.autograd.grad((a @ b.mT).sin().sum(), (q, k)) for a, b in (got, expected)]
    torch.testing.assert_close(got, tuple(expected))
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("arrangement", AXES)
def test_decoding_continues_from_the_largest_position(arrangement: str) -> None:
    """transformers #43952, mlx-vlm #1619: after an image, the next word is not at its index."""
    prompt = Layout.at(STORY[:8].unsqueeze(0))
    step = prompt.following()
    assert step.positions.flatten().tolist() == [5, 5, 5]
    assert prompt.concat(step).following().positions.flatten().tolist() == [6, 6, 6]
    encoding = Encoding(query_key=Mrope(head_dim=16, arrangement=arrangement))  # type: ignore[arg-type]
    q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
    whole = attend(q, k, v, Grid.of(Layout.at(STORY.unsqueeze(0)), causal=True), encoding)
    decoded = attend(
        q[:, :, 8:9], k[:, :, :9], v[:, :, :9], Grid(step, prompt.concat(step), True), encoding
    )
    torch.testing.assert_close(decoded, whole[:, :, 8:9])


def test_packed_prompts_continue_their_own_document() -> None:
    """Automodel #1482, Megatron #5243: documents and shards have their own three positions."""
    layout = Layout(
        torch.cat([STORY + 50, STORY[:8]]).unsqueeze(0),
        torch.arange(18).unsqueeze(0),
        document=torch.tensor([0] * 10 + [1] * 8).unsqueeze(0),
    )
    assert layout.following().positions.flatten().tolist() == [5, 5, 5]


def test_sections_by_hand() -> None:
    assert default_sections(64, "contiguous") == (16, 24, 24)
    assert default_sections(64, "interleaved") == (24, 20, 20)
    assert default_sections(4, "contiguous") == default_sections(4, "interleaved") == (2, 1, 1)
    assert default_sections(3, "interleaved") == (1, 1, 1)


def test_each_axis_turns_its_own_pairs() -> None:
    """VideoRoPE's complaint about contiguous sections, by hand: time has the fastest pairs."""
    here = torch.tensor([[[0.01, 0.1, 1.0]]])
    for arrangement, (sections, axes) in AXES.items():
        rope = Mrope(head_dim=16, sections=sections, arrangement=arrangement)  # type: ignore[arg-type]
        turned = rope.angles(Layout.at(here))[0, 0] * 1e6 ** (torch.arange(8) / 8)
        torch.testing.assert_close(turned, torch.tensor([10.0 ** (axis - 2) for axis in axes]))
