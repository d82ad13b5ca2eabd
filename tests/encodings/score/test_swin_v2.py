"""Swin v2 against transformers' module, loops and numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Swinv2Config
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

import posenc
from posenc import Encoding, Grid, Layout
from posenc.encodings.score.swin_v2 import CosineLogits, SwinV2Bias, swin_v2


def make(heads: int = 3, window: tuple[int, int] = (4, 4), hidden: int = 16) -> SwinV2Bias:
    made = SwinV2Bias(heads=heads, window=window, hidden=hidden).double().requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def bias(made: SwinV2Bias, grid: Grid) -> Tensor:
    heads = made.output.out_features
    q, k = (torch.zeros(1, heads, side.length, 4) for side in (grid.query, grid.key))
    return made(q, k, grid, scale=1.0)


def wide(layout: Layout) -> Layout:
    """The same layout with positions in float64, for close comparisons."""
    return replace(layout, positions=layout.positions.double())


def copy_layer(
    window: tuple[int, int], pretrained: tuple[int, int]
) -> tuple[posenc.Attention, Swinv2SelfAttention]:
    torch.manual_seed(0)
    theirs = Swinv2SelfAttention(
        Swinv2Config(attention_probs_dropout_prob=0.0), 24, 3, window, pretrained
    ).double()
    torch.nn.init.uniform_(theirs.logit_scale, 0.0, 6.0)
    mlp = theirs.continuous_position_bias_mlp
    encoding = swin_v2(heads=3, window=pretrained if pretrained[0] else window)
    layer = posenc.Attention(dim=24, heads=3, encoding=encoding, bias=True).double()
    with torch.no_grad():
        encoding.query_key.log_scale.copy_(theirs.logit_scale.flatten())
        encoding.score.input.load_state_dict(mlp[0].state_dict())
        encoding.score.output.load_state_dict(mlp[2].state_dict())
        for ours, other in ((layer.query, theirs.query), (layer.value, theirs.value)):
            ours.load_state_dict(other.state_dict())
        layer.key.weight.copy_(theirs.key.weight)
        layer.key.bias.zero_()
        layer.output.weight.copy_(torch.eye(24))
        layer.output.bias.zero_()
    return layer, theirs


@pytest.mark.parametrize(
    ("window", "pretrained"),
    [((4, 4), (0, 0)), ((2, 5), (0, 0)), ((1, 1), (0, 0)), ((6, 6), (4, 4)), ((3, 4), (5, 2))],
)
def test_equals_transformers(window: tuple[int, int], pretrained: tuple[int, int]) -> None:
    layer, theirs = copy_layer(window, pretrained)
    # Their coordinates were made in float32.
    table, _ = theirs.create_coords_table_and_index()
    theirs.relative_coords_table = table
    x = torch.randn(2, window[0] * window[1], 24, dtype=torch.float64)
    found = layer(x, wide(Layout.image(*window)))
    (expected,) = theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    score, query_key = layer.encoding.score, layer.encoding.query_key
    mlp = theirs.continuous_position_bias_mlp
    for ours, other in (
        (score.input.weight, mlp[0].weight),
        (score.input.bias, mlp[0].bias),
        (score.output.weight, mlp[2].weight),
        (query_key.log_scale, theirs.logit_scale),
        (layer.query.weight, theirs.query.weight),
        (layer.key.weight, theirs.key.weight),
    ):
        assert other.grad is not None
        torch.testing.assert_close(ours.grad, other.grad.view_as(ours), rtol=1e-4, atol=1e-6)


def test_the_shift_mask_counts_once() -> None:
    """transformers' swinv2 adds its mask of -100 twice; where it hides all, once says the same."""
    layer, theirs = copy_layer((2, 4), (0, 0))
    document = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1]])
    mask = torch.where(document[0].unsqueeze(0) == document[0].unsqueeze(1), 0.0, -100.0)
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    found = layer(x, replace(wide(Layout.image(2, 4)), document=document))
    (expected,) = theirs(x, mask.double().unsqueeze(0))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_axis_of_one_cell_divides_by_nothing() -> None:
    """transformers and timm divide by zero for a window one cell wide."""
    theirs = Swinv2SelfAttention(Swinv2Config(), 24, 3, (4, 1))
    assert theirs.relative_coords_table.isnan().any()
    made = make(window=(4, 1))
    assert made.coordinates(torch.tensor([[3.0, 0.0], [0.0, 2.0]])).tolist() == [
        [pytest.approx(-math.log2(9) / 3), 0.0],
        [0.0, 0.0],
    ]
    assert bias(made, Grid.of(Layout.image(4, 1))).isfinite().all()


def test_a_number_by_hand() -> None:
    # Window 9: an offset of 7 cells is scaled to 7, so u = log2(8)/log2(8) = 1; of 1 to 1/3.
    made = SwinV2Bias(heads=1, window=(9, 9), hidden=1)
    coordinates = made.coordinates(torch.tensor([[-7.0, 1.0]]))
    assert coordinates.tolist() == [[pytest.approx(1.0), pytest.approx(-1 / 3)]]
    with torch.no_grad():
        made.input.weight.copy_(torch.tensor([[1.0, 3.0]]))
        made.output.weight.fill_(math.log(3.0))
    # Hidden: 1 - 1 = 0 here, and 1 with the key to the left of 1 less row: 16·σ(log 3) = 12.
    assert made.bias(torch.tensor([[-7.0, 1.0]]))[0].tolist() == [pytest.approx(8.0, abs=1e-5)]
    assert made.bias(torch.tensor([[-7.0, 0.0]]))[0].tolist() == [pytest.approx(12.0)]


GRIDS = {
    "image": Grid.of(Layout.image(3, 5)),
    "two images": Grid(Layout.image(2, 2), Layout.image(3, 1)),
    "one cell": Grid.of(Layout.image(1, 1)),
    "beyond the window": Grid(Layout.image(9, 2).slice(0, 3), Layout.image(9, 2)),
    "fractions, own positions a row": Grid.of(
        Layout.at(torch.tensor([[[0.0, 0.4], [1.6, 3.0]], [[90.0, 7.0], [-400.0, 4.0]]]))
    ),
    "special tokens": Grid.of(Layout.image(2, 3, prefix=1)),
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid) -> None:
    made = make(window=(3, 4))
    grid = Grid(wide(grid.query), wide(grid.key))
    found = bias(made, grid)
    first, last = made.input, made.output

    def scaled(back: float, side: int) -> float:
        back *= 8 / (side - 1)
        return math.copysign(math.log2(abs(back) + 1) / math.log2(8), back)

    for b in range(found.shape[0]):
        for i, at in enumerate(grid.query.positions[b].tolist()):
            for j, to in enumerate(grid.key.positions[b].tolist()):
                if grid.query.special is not None and 0 in (i, j):
                    assert not found[b, :, i, j].any()
                    continue
                u = torch.tensor([scaled(at[0] - to[0], 3), scaled(at[1] - to[1], 4)]).double()
                hidden = (first.weight @ u + first.bias).clamp(min=0)
                expected = 16 / (1 + (-(last.weight @ hidden)).exp())
                torch.testing.assert_close(found[b, :, i, j], expected, rtol=1e-5, atol=1e-6)


def test_dot_logits_are_the_bias_alone() -> None:
    encoding = swin_v2(heads=3, logits="dot")
    assert encoding.query_key is None
    assert encoding.default_scale(16) == 0.25
    assert isinstance(swin_v2(heads=3).query_key, CosineLogits)


def test_initial_values() -> None:
    torch.manual_seed(0)
    encoding: Encoding = posenc.create("swin_v2", heads=3)
    assert encoding.query_key.log_scale.exp().tolist() == pytest.approx([10.0] * 3)
    assert encoding.score.input.weight.std().item() == pytest.approx(0.02, rel=0.1)
    near_eight = bias(encoding.score, Grid.of(Layout.image(8, 8)))
    torch.testing.assert_close(near_eight, torch.full_like(near_eight, 8.0), rtol=0, atol=0.2)
