"""Parts of an encoding under attention that is not posenc's."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from posenc import Encoding, Grid, Layout, attend, create
from posenc.encoding import Rotation
from posenc.errors import ArgumentError
from posenc.registry import ENCODINGS

HEADS, WIDTH = 6, 8


def made(name: str) -> Encoding:
    claims = ENCODINGS[name.partition("@")[0]].claims
    torch.manual_seed(0)
    encoding = create(
        name, dim=HEADS * WIDTH, heads=HEADS, head_dim=WIDTH, max_length=64, causal=claims.serves(1)
    )
    for parameter in encoding.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter)
    return encoding.requires_grad_(False).eval()


def grid_of(name: str) -> Grid:
    claims = ENCODINGS[name.partition("@")[0]].claims
    if claims.serves(1):
        return Grid.of(Layout.padded([12, 7], side="left"), causal=True)
    if claims.serves(2):
        return Grid.of(Layout.image(3, 4))
    return Grid.of(Layout.at(torch.randint(9, (1, 12, 3)).float()), causal=True)


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(3, 2, HEADS, length, WIDTH).unbind())


BIASES = [n for n in ENCODINGS if (score := made(n).score) is not None and score.by_position]


def test_which_are_biases() -> None:
    assert {"alibi", "dynamic_bias", "fire", "kerple", "sandwich", "swin", "t5", "tupe"} <= {
        *BIASES
    }


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_under_plain_attention_equals_attend(name: str) -> None:
    encoding, grid = made(name), grid_of(name)
    q, k, v = inputs(grid.query.length)
    scale = encoding.default_scale(WIDTH)
    bias = encoding.bias(grid, scale=scale)
    assert bias.shape[1:] == (HEADS, 12, 12)
    assert bias.isfinite().all()
    mask = bias.masked_fill(~grid.visible, -torch.inf)
    turned = (q, k) if encoding.query_key is None else encoding.query_key(q, k, grid)
    got = scaled_dot_product_attention(*turned, v, attn_mask=mask, scale=scale).nan_to_num()
    expected = attend(q, k, v, grid, encoding, backend="reference")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [n for n, e in ENCODINGS.items() if "score" in e.claims.sites and n not in BIASES]
)
def test_what_reads_tokens_has_no_bias(name: str) -> None:
    encoding, grid = made(name), grid_of(name)
    with pytest.raises(ArgumentError, match="a score part that depends on positions only"):
        encoding.bias(grid)
    with pytest.raises(ArgumentError, match="a score part that depends on positions only"):
        encoding.score_mod(grid)


def test_positions_of_other_axes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layout: expected positions with 1 axes"):
        made("rope").cos_sin(Layout.image(2, 3))
    with pytest.raises(ArgumentError, match="layout: expected positions with 2 axes"):
        made("swin").bias(Grid.of(Layout.sequence(4)))


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_for_another_mask_is_refused_as_attend_refuses_it(name: str) -> None:
    """A bidirectional T5 gives the past half of its buckets."""
    claims, layout = ENCODINGS[name].claims, grid_of(name).query
    refused = 0
    for made_for in (False, True):
        encoding = create(name, dim=48, heads=HEADS, head_dim=WIDTH, max_length=64, causal=made_for)
        for causal in (False, True):
            grid = Grid.of(layout, causal=causal)
            try:
                attend(*inputs(layout.length), grid, encoding, backend="reference")
            except ArgumentError as error:
                refused += 1
                for use in (encoding.bias, encoding.score_mod):
                    with pytest.raises(ArgumentError, match=re.escape(str(error))):
                        use(grid, scale=1.0)
            else:
                encoding.bias(grid, scale=1.0)
    assert bool(refused) == (claims.causal_only or name in ("t5", "tupe"))


def test_only_tupe_needs_the_scale() -> None:
    grid = grid_of("tupe")
    with pytest.raises(ArgumentError, match="scale: expected the softmax scale"):
        made("tupe").bias(grid)
    with pytest.raises(ArgumentError, match="got no such part"):
        made("rope").bias(grid)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, Layout.padded([12, 7], side="left")) for name in ("alibi", "t5", "tupe")]
    + [("alibi", Layout.sequence(12))],
)
def test_mods_under_flex_attention_equal_attend(name: str, layout: Layout) -> None:
    encoding, grid = made(name), Grid.of(layout, causal=True)
    q, k, v = inputs(12)
    scale = encoding.default_scale(WIDTH)
    add, seen = encoding.score_mod(grid, scale=scale), grid.mask_mod()

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(seen(b, h, i, j), add(score, b, h, i, j), -torch.inf)

    got = flex_attention(q, k, v, score_mod=mod, scale=scale)
    expected = attend(q, k, v, grid, encoding, backend="reference")
    torch.testing.assert_close(got.nan_to_num(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "grid",
    [
        Grid.of(Layout.padded([9, 4]), causal=True, window=3),
        Grid.of(Layout.packed([4, 5])),
        Grid(Layout.sequence(3, 6), Layout.sequence(9), causal=True),
    ],
)
def test_mask_mods_say_what_is_visible(grid: Grid) -> None:
    rows, queries, keys = grid.visible.shape[0], grid.query.length, grid.key.length
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (rows, 1, queries, keys)), indexing="ij")
    assert torch.equal(grid.mask_mod()(b, h, i, j).expand(grid.visible.shape), grid.visible)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, *, adjacent: bool) -> Tensor:
    """As Hugging Face's models write it."""
    if cosine.dim() == 3:
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    width = cosine.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if adjacent:
        half = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    else:
        half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], dim=-1)
    return torch.cat([turned * cosine + half * sine, rest], dim=-1)


def rotates(name: str) -> bool:
    try:
        made(name).cos_sin(grid_of(name).query)
    except ArgumentError:
        return False
    return True


ROTATIONS = [name for name in ENCODINGS if rotates(name)]


@pytest.mark.parametrize("name", [*ROTATIONS, "rope@pairing=adjacent"])
def test_cosines_and_sines_rotate_as_the_encoding_does(name: str) -> None:
    encoding, grid = made(name), grid_of(name)
    q, k, _ = inputs(12)
    assert encoding.query_key is not None
    rotation = encoding.query_key.lower(q, k, grid)
    assert isinstance(rotation, Rotation)
    cosine, sine = encoding.cos_sin(grid.query)
    adjacent = rotation.pairing == "adjacent"
    for x, expected in zip((q, k), encoding.query_key(q, k, grid), strict=True):
        got = rotated(x, cosine, sine, adjacent=adjacent)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "xpos", "grape_multiplicative", "swin_v2"])
def test_what_does_more_than_rotate_has_no_cosines(name: str) -> None:
    assert {"rope", "axial_rope", "rope2d", "mrope", "p_rope", "rope_mixed", "fope"} <= {*ROTATIONS}
    with pytest.raises(ArgumentError, match="only rotates by position"):
        made(name).cos_sin(grid_of(name).query)


@pytest.mark.parametrize("side", ["left", "right"])
def test_layouts_from_attention_masks(side: str) -> None:
    padded = Layout.padded([5, 2], side=side)
    assert padded.valid is not None
    layout = Layout.from_attention_mask(padded.valid.long())
    valid = padded.valid
    assert torch.equal(layout.positions[valid], padded.positions[valid])
    assert torch.equal(layout.order[valid], padded.order[valid])
    assert not layout.positions[~valid].any()
    q, k, v = inputs(5)
    encoding = create("rope", head_dim=WIDTH) + create("alibi", heads=HEADS)
    outputs = [attend(q, k, v, Grid.of(each, causal=True), encoding) for each in (layout, padded)]
    torch.testing.assert_close(*outputs)


def test_wrong_attention_masks_are_refused() -> None:
    for mask in (torch.ones(4), torch.tensor([[0.0, -torch.inf]]), torch.tensor([[2, 1]])):
        with pytest.raises(ArgumentError, match="mask: expected 0 and 1 of shape"):
            Layout.from_attention_mask(mask)


def test_special_tokens_of_texts() -> None:
    for layout in (
        Layout.sequence(4, 3, prefix=2),
        Layout.padded([4], prefix=2),
        Layout.from_attention_mask(
            torch.ones(1, 6), special=torch.tensor([[True, True, False, False, False, False]])
        ),
    ):
        assert layout.special is not None
        assert layout.special.tolist() == [[True] * 2 + [False] * 4]
        assert not layout.positions[:, :2].any()
        steps = layout.positions[0, 2:, 0] - layout.positions[0, 2, 0]
        assert steps.tolist() == [0, 1, 2, 3]
        assert layout.order.diff().tolist() == [[1] * 5]
    with pytest.raises(ArgumentError, match="prefix: expected a whole number, 0 or more"):
        Layout.sequence(3, prefix=-1)


@pytest.mark.parametrize("layout", [Layout.sequence(5, prefix=1), Layout.padded([5, 3], prefix=1)])
def test_tupes_untied_class_token_learns(layout: Layout) -> None:
    encoding = create("tupe", dim=HEADS * WIDTH, heads=HEADS, max_length=64)
    assert encoding.score is not None
    grid = Grid.of(layout)
    outputs = []
    for backend in ("blockwise", "reference"):
        encoding.zero_grad()
        output = attend(*inputs(6), grid, encoding, backend=backend)
        output.square().sum().backward()
        assert encoding.score.special.grad.all()
        outputs.append(encoding.score.special.grad.clone())
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


def test_layouts_and_grids_may_be_passed_by_name() -> None:
    """Positions that float32 rounds are exact in float64 then, too."""
    rope, layout = create("rope", head_dim=WIDTH).query_key, Layout.sequence(9, start=2**24 - 8)
    q, grid = torch.randn(1, 1, 9, WIDTH, dtype=torch.float64), Grid.of(layout)
    assert rope is not None
    for found, expected in zip(rope(q, q, grid=grid), rope(q, q, grid), strict=True):
        assert torch.equal(found, expected)


def test_other_default_devices_change_nothing() -> None:
    """Neither does what was computed under one stay."""
    layout, encoding = Layout.sequence(43), create("rope", head_dim=WIDTH)
    q = torch.randn(1, 2, 43, WIDTH)
    with torch.device("meta"):
        found = attend(q, q, q, Grid.of(layout), encoding)
    torch.testing.assert_close(found, attend(q, q, q, Grid.of(layout), encoding))
