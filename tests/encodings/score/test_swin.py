"""Swin's biases against transformers' modules, loops, and an index worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import SwinConfig
from transformers.models.swin import modeling_swin

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.common.window import Window
from posenc.encodings.score.swin import Swin
from posenc.errors import LengthError

WINDOWS = [(7, 7), (2, 3), (3, 2), (1, 4), (4, 1), (1, 1)]


def bias(swin: Swin, grid: Grid) -> Tensor:
    heads = swin.table.shape[0]
    q, k = (torch.zeros(1, heads, side.length, 4) for side in (grid.query, grid.key))
    return swin(q, k, grid, scale=1.0)


# Every entry for 2 rows of 3 cells. Cells in raster order: (0,0) (0,1) (0,2) (1,0) (1,1) (1,2).
# Step by step: Δ' = query - key is -1 … 1 in rows and -2 … 2 in columns; adding (1, 2) makes both
# start at 0; a row of the table holds 2·3 - 1 = 5 columns, so rows count 5 each. The query at the
# first cell and the key at the last have Δ' = (-1, -2), so 0·5 + 0 = 0; a cell and itself have
# 1·5 + 2 = 7; the reverse of the first is 2·5 + 4 = 14.
BY_HAND = [
    [7, 6, 5, 2, 1, 0],
    [8, 7, 6, 3, 2, 1],
    [9, 8, 7, 4, 3, 2],
    [12, 11, 10, 7, 6, 5],
    [13, 12, 11, 8, 7, 6],
    [14, 13, 12, 9, 8, 7],
]


def test_every_entry_of_a_two_by_three_window() -> None:
    offset = Grid.of(Layout.image(2, 3)).offset
    assert Window(2, 3).index(offset)[0].tolist() == BY_HAND


def test_the_index_step_by_step() -> None:
    rows = [0, 0, 0, 1, 1, 1]
    columns = [0, 1, 2, 0, 1, 2]
    down = [[a - b for b in rows] for a in rows]
    across = [[a - b for b in columns] for a in columns]
    assert down[0] == [0, 0, 0, -1, -1, -1]
    assert across[0] == [0, -1, -2, 0, -1, -2]
    down = [[entry + 1 for entry in line] for line in down]
    across = [[entry + 2 for entry in line] for line in across]
    down = [[entry * 5 for entry in line] for line in down]
    summed = [
        [y + x for y, x in zip(*lines, strict=True)] for lines in zip(down, across, strict=True)
    ]
    assert summed == BY_HAND


def test_the_index_by_closed_form() -> None:
    # n = 5 (⌊i/3⌋ - ⌊j/3⌋ + 1) + (i mod 3 - j mod 3) + 2.
    closed = [[5 * (i // 3 - j // 3 + 1) + (i % 3 - j % 3) + 2 for j in range(6)] for i in range(6)]
    assert closed == BY_HAND


def test_rows_of_a_window_that_is_not_square_do_not_collide() -> None:
    """nnFormer #8: a row stride of 3·W - 1; 2·W - 1 is the one without gaps or collisions."""
    index = Window(4, 2).index(Window(4, 2).offsets())
    assert index.tolist() == list(range(7 * 3))


@pytest.mark.parametrize("sides", WINDOWS)
def test_index_and_bias_equal_transformers(sides: tuple[int, int]) -> None:
    theirs = modeling_swin.SwinRelativePositionBias(6, sides)
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    swin = Swin(heads=6, window=sides)
    with torch.no_grad():
        swin.table.copy_(theirs.relative_position_bias_table.T)
    grid = Grid.of(Layout.image(*sides))
    index = swin.offsets.index(grid.offset)[0]
    assert index.flatten().tolist() == theirs.relative_position_index.tolist()
    expected = theirs()
    torch.testing.assert_close(bias(swin, grid), expected, rtol=0, atol=0)
    weight = torch.randn(expected.shape)
    (bias(swin, grid) * weight).sum().backward()
    (expected * weight).sum().backward()
    assert swin.table.grad is not None
    torch.testing.assert_close(swin.table.grad.T, theirs.relative_position_bias_table.grad)


def regions(height: int, width: int, window: int, shift: int) -> Tensor:
    """The window each cell is in once windows start ``shift`` cells early: ``[1, L]``."""
    rows, columns = torch.arange(height) + window - shift, torch.arange(width) + window - shift
    line = width // window + 2
    return ((rows // window).unsqueeze(1) * line + columns // window).reshape(1, -1)


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_windows_are_documents_shifted_or_not(size: tuple[int, int], shift: int) -> None:
    """A Swin layer's rolling, masking and unrolling are one attention over documents."""
    config = SwinConfig(
        window_size=4, embed_dim=12, num_heads=[3], depths=[1], drop_path_rate=0.0, qkv_bias=True
    )
    config._attn_implementation = "eager"
    theirs = modeling_swin.SwinLayer(config, dim=12, input_resolution=size, num_heads=3).eval()
    theirs.shift_size = shift
    torch.nn.init.normal_(theirs.attention.relative_position_bias.relative_position_bias_table)
    swin = Swin(heads=3, window=(4, 4))
    layer = posenc.Attention(dim=12, heads=3, encoding=Encoding.of(swin), bias=True).eval()
    with torch.no_grad():
        table = theirs.attention.relative_position_bias.relative_position_bias_table
        swin.table.copy_(table.T)
        pairs = (
            (layer.query, theirs.attention.q_proj),
            (layer.key, theirs.attention.k_proj),
            (layer.value, theirs.attention.v_proj),
            (layer.output, theirs.attention.o_proj),
        )
        for ours, other in pairs:
            ours.load_state_dict(other.state_dict())
    x = torch.randn(2, size[0] * size[1], 12)
    layout = replace(Layout.image(*size), document=regions(*size, 4, shift))
    normed = theirs.layernorm_before(x)
    found = layer(normed, layout)

    windows = modeling_swin.window_partition(
        theirs.cyclic_shift(normed.view(2, *size, 12)), 4
    ).flatten(1, 2)
    mask = theirs.get_attn_mask(*size, dtype=x.dtype, device=x.device)
    attended = theirs.attention(windows, mask)[0].view(-1, 4, 4, 12)
    merged = modeling_swin.window_reverse(attended, 4, *size)
    expected = theirs.cyclic_shift(merged, reverse=True).flatten(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "grid",
    [
        Grid.of(Layout.image(3, 2)),
        Grid(Layout.image(3, 4).slice(4, 7), Layout.image(3, 4)),
        Grid.of(Layout.at(torch.tensor([[[0.0, 0.4], [1.6, 3.0]], [[90.0, 7.0], [91.0, 4.0]]]))),
        Grid.of(Layout.image(2, 2, prefix=2)),
    ],
    ids=["image", "fewer queries", "fractions, own positions a row", "special tokens"],
)
def test_equals_loops(grid: Grid) -> None:
    swin = Swin(heads=3, window=(3, 5)).requires_grad_(False)
    torch.nn.init.normal_(swin.table)
    found = bias(swin, grid)
    special = grid.query.special
    for b in range(found.shape[0]):
        for i, at in enumerate(grid.query.positions[b].tolist()):
            for j, to in enumerate(grid.key.positions[b].tolist()):
                n = (round(at[0] - to[0]) + 2) * 9 + round(at[1] - to[1]) + 4
                nowhere = special is not None and bool(special[0, i] or special[0, j])
                expected = torch.zeros(3) if nowhere else swin.table[:, n]
                assert found[b, :, i, j].equal(expected)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.image(3, 4),
        Layout.image(2, 5),
        Layout.at(torch.tensor([[[0.0, 0.0], [2.6, 0.0]]])),
        Layout.image(3, 4).slice(0, 12),
    ],
    ids=["too high", "too wide", "a fraction too far", "positions"],
)
def test_offsets_outside_the_window_are_refused(layout: Layout) -> None:
    swin = Swin(heads=2, window=(2, 4))
    q = torch.zeros(1, 2, layout.length, 4)
    with pytest.raises(LengthError, match="2 by 4 cells"):
        attend(q, q, q, Grid.of(layout), Encoding.of(swin))


def test_an_image_known_by_its_size_is_refused_on_any_device() -> None:
    with pytest.raises(LengthError, match="got 8 by 8"):
        Window(7, 7).require(Grid.of(Layout.image(9, 9, device="meta")))


def test_only_what_sees_each_other_must_be_inside() -> None:
    layout = Layout.image(6, 6)
    swin = Swin(heads=2, window=(2, 2)).requires_grad_(False)
    q = torch.randn(1, 2, 36, 4)
    windows = replace(layout, document=regions(6, 6, 2, 0))
    assert attend(q, q, q, Grid.of(windows), Encoding.of(swin)).isfinite().all()
    padding = torch.zeros(1, 6, 6, dtype=torch.bool)
    padding[:, 2:4, 2:4] = True
    inside = Layout.image(6, 6, valid=padding)
    assert attend(q, q, q, Grid.of(inside), Encoding.of(swin)).isfinite().all()
    padding[:, 5, 5] = True
    with pytest.raises(LengthError):
        attend(q, q, q, Grid.of(Layout.image(6, 6, valid=padding)), Encoding.of(swin))


def test_unchecked_offsets_outside_become_nan_not_a_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Window, "require", lambda self, grid: False)
    swin = Swin(heads=1, window=(2, 2))
    found = bias(swin, Grid.of(Layout.at(torch.tensor([[[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]]))))
    assert found.isnan()[0, 0].tolist() == [
        [False, False, True],
        [False, False, False],
        [True, False, False],
    ]
