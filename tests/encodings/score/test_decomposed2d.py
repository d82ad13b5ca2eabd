"""Decomposed relative positions against transformers' SAM, loops and a number by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionAttention

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encoding import BucketedTerms
from posenc.encodings.common.window import Window
from posenc.encodings.score.decomposed2d import Decomposed2d
from posenc.errors import LengthError


def make(size: tuple[int, int] = (3, 5), width: int = 4) -> Decomposed2d:
    torch.manual_seed(4)
    made = Decomposed2d(head_dim=width, size=size).double()
    for table in made.parameters():
        torch.nn.init.normal_(table)
    return made


def score(made: Decomposed2d, q: Tensor, grid: Grid, *, scale: float = 0.5) -> Tensor:
    k = q.new_zeros(*q.shape[:2], grid.key.length, q.shape[-1])
    return made(q, k, grid, scale=scale)


def sam(size: tuple[int, int]) -> SamVisionAttention:
    config = SamVisionConfig(hidden_size=24, num_attention_heads=3, attention_dropout=0.0)
    theirs = SamVisionAttention(config, window_size=1)  # square; its tables are replaced below
    theirs.rel_pos_h = torch.nn.Parameter(torch.randn(2 * size[0] - 1, 8))
    theirs.rel_pos_w = torch.nn.Parameter(torch.randn(2 * size[1] - 1, 8))
    return theirs.double()


@pytest.mark.parametrize("size", [(4, 4), (2, 5), (5, 1), (1, 1)])
def test_equals_sam(size: tuple[int, int]) -> None:
    theirs = sam(size)
    encoding = posenc.create("decomposed2d", head_dim=8, size=size)
    layer = posenc.Attention(dim=24, heads=3, encoding=encoding, bias=True).double()
    with torch.no_grad():
        parts = (layer.query, layer.key, layer.value)
        weights = theirs.qkv.weight.chunk(3), theirs.qkv.bias.chunk(3)
        for part, weight, bias in zip(parts, *weights, strict=True):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        layer.output.load_state_dict(theirs.proj.state_dict())
        encoding.score.rows.copy_(theirs.rel_pos_h)
        encoding.score.columns.copy_(theirs.rel_pos_w)
    x = torch.randn(2, *size, 24, dtype=torch.float64)
    found = layer(x.flatten(1, 2), Layout.image(*size))
    expected = theirs(x)[0].flatten(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # their softmax: float32
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, other in (
        (encoding.score.rows, theirs.rel_pos_h),
        (encoding.score.columns, theirs.rel_pos_w),
    ):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [2, 3])
def test_pooled_keys_are_a_layout(stride: int) -> None:
    """MViTv2 pools keys; its stretched coordinates are cells at r·j + r - 1."""
    theirs = sam((6, 12))
    keys = Layout.image(6 // stride, 12 // stride)
    keys = keys.with_positions(keys.positions * stride + stride - 1)
    made = make((6, 12), 8)
    with torch.no_grad():
        made.rows.copy_(theirs.rel_pos_h)
        made.columns.copy_(theirs.rel_pos_w)
    q = torch.randn(2, 3, 72, 8, dtype=torch.float64)
    expected = theirs.get_decomposed_rel_pos(
        q.flatten(0, 1), theirs.rel_pos_h, theirs.rel_pos_w, (6, 12), (6 // stride, 12 // stride)
    )
    found = score(made, q, Grid(Layout.image(6, 12), keys))
    torch.testing.assert_close(found, expected.reshape(found.shape))


@pytest.mark.parametrize(
    "grid",
    [
        Grid.of(Layout.image(3, 5)),
        Grid(Layout.image(3, 5).slice(4, 7), Layout.image(2, 3)),
        Grid.of(Layout.at(torch.tensor([[[0.0, 0.4], [1.6, 3.0]], [[90.0, 7.0], [91.0, 4.0]]]))),
        Grid.of(Layout.image(2, 2, prefix=2)),
    ],
    ids=["image", "fewer queries", "fractions, own positions a row", "special tokens"],
)
def test_equals_loops(grid: Grid) -> None:
    made = make()
    q = torch.randn(2, 3, grid.query.length, 4, dtype=torch.float64)
    found = score(made, q, grid)
    special = grid.query.special
    for b in range(2):
        row = min(b, grid.query.positions.shape[0] - 1)
        for i, at in enumerate(grid.query.positions[row].tolist()):
            for j, to in enumerate(grid.key.positions[row].tolist()):
                if special is not None and (special[0, i] or special[0, j]):
                    assert not found[b, :, i, j].any()
                    continue
                vector = (
                    made.rows[round(at[0] - to[0]) + 2] + made.columns[round(at[1] - to[1]) + 4]
                )
                torch.testing.assert_close(found[b, :, i, j], q[b, :, i] @ vector)


def test_a_number_by_hand() -> None:
    # Query at (0, 0), key at (1, 2): rows entry 0 - 1 + 1 = 0, columns entry 0 - 2 + 2 = 0.
    made = Decomposed2d(head_dim=2, size=(2, 3))
    with torch.no_grad():
        made.rows[0] = torch.tensor([1.0, 10.0])
        made.columns[0] = torch.tensor([100.0, 1000.0])
    q = torch.tensor([2.0, 3.0]).expand(1, 1, 6, 2)
    found = score(made, q, Grid.of(Layout.image(2, 3)))
    assert found[0, 0, 0, 5].item() == 2 * 101 + 3 * 1010
    assert found[0, 0, 5, 0].item() == 0.0


def test_the_query_is_not_scaled() -> None:
    made = make()
    q, grid = torch.randn(1, 3, 15, 4, dtype=torch.float64), Grid.of(Layout.image(3, 5))
    assert score(made, q, grid, scale=0.1).equal(score(made, q, grid, scale=7.0))


def test_lowered_to_a_group_an_axis_without_pairs() -> None:
    made, grid = make((40, 50)), Grid.of(Layout.image(40, 50))
    q = torch.randn(1, 3, 2000, 4, dtype=torch.float64)
    groups = made.lower(q, q, grid, scale=0.5)
    assert len(groups) == 2
    for group in groups:
        assert isinstance(group, BucketedTerms)
        assert group.table is None
        assert group.left.tokens.numel() == q.numel()
        assert group.left.rows.shape[1] <= 100
    small = Grid(grid.query.slice(0, 3), grid.key.slice(0, 60))
    expected = score(made, q[:, :, :3], small)
    dense = torch.zeros_like(expected)
    for group in made.lower(q[:, :, :3], q[:, :, :60], small, scale=0.5):
        products = group.left.tokens @ group.left.rows.mT
        dense += products.gather(-1, group.bucket(small.offset).unsqueeze(1).expand(1, 3, 3, 60))
    torch.testing.assert_close(dense, expected)


def test_special_tokens_have_no_structured_form() -> None:
    q = torch.randn(1, 3, 7, 4, dtype=torch.float64)
    assert make().lower(q, q, Grid.of(Layout.image(2, 3, prefix=1)), scale=1.0) is None


@pytest.mark.parametrize("layout", [Layout.image(4, 5), Layout.image(3, 6).slice(0, 18)])
def test_larger_images_are_refused_not_resized(layout: Layout) -> None:
    """SAM and MViT resize their tables silently; here an extension does, when asked."""
    q = torch.zeros(1, 3, layout.length, 4)
    with pytest.raises(LengthError, match=r"3 by 5 cells.*posenc\.extension"):
        attend(q, q, q, Grid.of(layout), Encoding.of(make().float()))


def test_unchecked_offsets_outside_become_nan_not_a_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Window, "require", lambda self, grid: False)
    made = make((2, 2))
    grid = Grid.of(Layout.at(torch.tensor([[[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]])))
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    outside = [[False, False, True], [False, False, False], [True, False, False]]
    found = score(made, q, grid)
    assert found.isnan()[0, 0].tolist() == outside
    first, second = made.lower(q, q, grid, scale=1.0)
    dense = first.table[:, first.bucket(grid.offset)] + second.table[:, second.bucket(grid.offset)]
    assert dense.isnan()[0, 0].tolist() == outside
    found.nan_to_num().sum().backward()
    assert q.grad.isfinite().all()
    assert all(table.grad.isfinite().all() for table in made.parameters())
