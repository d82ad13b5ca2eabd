"""Axial RoPE against loops, Qwen2-VL's image encoder and DINOv3."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DINOv3ViTConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding
from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb as dino_rotate
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.query_key.rope2d import Rope2d
from posenc.errors import ArgumentError
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import inputs
from tests.encodings.image_grids import IMAGES, rotate_axes_by_loops


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("grid", IMAGES.values(), ids=IMAGES)
def test_equals_loops(grid: Grid, pairing: str) -> None:
    q, k, v = inputs(grid)

    def angle(head: int, pair: int, at: list[float]) -> float:
        axis, step = divmod(pair, 2)  # width 8: four pairs, two an axis
        return at[axis] * 100.0 ** (-4 * step / 8)

    how = {"adjacent": pairing == "adjacent"}
    turned = (
        rotate_axes_by_loops(q, grid.query, angle, **how),
        rotate_axes_by_loops(k, grid.key, angle, **how),
    )
    rope = Rope2d(head_dim=8, pairing=pairing)  # type: ignore[arg-type]
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, attention_by_loops(*turned, v, grid), atol=2e-4, rtol=1e-4)


def test_a_cell_by_hand() -> None:
    # Width 4 has one pair an axis, both turning a radian a cell. At row π/2, column π the pair
    # (1, 0) of the row becomes (0, 1), that of the column (-1, 0).
    grid = Grid.of(Layout.at(torch.tensor([[[math.pi / 2, math.pi]]])))
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    turned, _ = Rope2d(head_dim=4)(x, x, grid)
    torch.testing.assert_close(turned.flatten(), torch.tensor([0.0, -1.0, 1.0, 0.0]))


def test_equals_the_image_encoder_of_qwen2_vl() -> None:
    config = Qwen2VLVisionConfig(embed_dim=64, num_heads=4)
    layout = Layout.image(3, 5)
    q, k = (torch.randn(15, 4, 16, requires_grad=True) for _ in range(2))
    cosine, sine = Qwen2VLVisionRotaryEmbedding(config)(q, layout.positions[0].long())
    expected = apply_rotary_pos_emb_vision(q, k, cosine.squeeze(0), sine.squeeze(0))
    rope = Rope2d(head_dim=16, base=10000.0)
    got = rope(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k)), Grid.of(layout))
    for mine, theirs in zip(got, expected, strict=True):
        mine = mine[0].transpose(0, 1)
        torch.testing.assert_close(mine, theirs)
        for x in torch.autograd.grad(mine.sin().sum() - theirs.sin().sum(), (q, k), **UNUSED):
            torch.testing.assert_close(x, torch.zeros_like(q), atol=1e-5, rtol=0)


UNUSED = {"materialize_grads": True, "allow_unused": True}


def test_equals_dinov3_at_its_centred_positions() -> None:
    """Positions are data: DINOv3's normalised coordinates are a layout, not another method."""
    config = DINOv3ViTConfig(hidden_size=64, num_attention_heads=4, patch_size=16, image_size=64)
    q, k = torch.randn(2, 4, 13, 16), torch.randn(2, 4, 13, 16)
    cosine, sine = DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 64, 48))
    expected = dino_rotate(q, k, cosine, sine)
    layout = Layout.image(4, 3, prefix=1)
    centred = 2 * (layout.positions + 0.5) / torch.tensor([4.0, 3.0]) - 1
    grid = Grid.of(layout.with_positions(2 * math.pi * centred))
    torch.testing.assert_close(Rope2d(head_dim=16)(q, k, grid), tuple(expected))


def test_one_axis_is_rope_of_half_the_head() -> None:
    """In a single column, the column's half stands still and the row's is RoPE."""
    column = Layout.image(7, 1)
    x = torch.randn(1, 2, 7, 16)
    turned, _ = Rope2d(head_dim=16, pairing="adjacent")(x, x, Grid.of(column))
    rope = Rope(head_dim=8, base=100.0, pairing="adjacent")
    alone, _ = rope(x[..., :8], x[..., :8], Grid.of(Layout.sequence(7)))
    torch.testing.assert_close(turned, torch.cat([alone, x[..., 8:]], dim=-1))


def test_rows_and_columns_are_not_mixed_up() -> None:
    """mae #67: a transposed meshgrid passes on squares, and on non-square images is wrong."""
    x = torch.randn(1, 1, 6, 8)
    rope = Rope2d(head_dim=8)
    tall, _ = rope(x, x, Grid.of(Layout.image(3, 2)))
    wide, _ = rope(x, x, Grid.of(Layout.image(2, 3)))
    assert not torch.allclose(tall, wide, atol=1e-2)
    # Cell 3 stands at (1, 1) in the tall image and at (1, 0) in the wide one.
    torch.testing.assert_close(tall[..., 3, 0], wide[..., 3, 0])
    assert not torch.allclose(tall[..., 3, 2], wide[..., 3, 2], atol=1e-3)


def test_texts_are_refused() -> None:
    """positional-encodings #42: a wrong number of axes is an error, not a wrong rotation."""
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(ArgumentError, match="2 axes"):
        attend(q, q, q, Grid.of(Layout.sequence(3)), Encoding(query_key=Rope2d(head_dim=8)))
