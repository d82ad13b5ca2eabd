"""Layouts and grids: positions as data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Grid, Layout
from posenc.distributed.shards import take
from posenc.errors import ArgumentError


def test_sequence_is_regular() -> None:
    layout = Layout.sequence(4, start=3)
    assert layout.positions[0, :, 0].tolist() == layout.order[0].tolist() == [3, 4, 5, 6]
    assert (layout.start, layout.length, layout.axes, layout.batch) == (3, 4, 1, 1)


def test_packed_restarts_positions_but_not_order() -> None:
    """torchtitan #2559, OLMo-core #591, nanoVLM #201: packed positions were never reset."""
    layout = Layout.packed([2, 3])
    assert layout.positions[0, :, 0].tolist() == [0, 1, 0, 1, 2]
    assert layout.order[0].tolist() == [0, 1, 2, 3, 4]
    assert layout.document is not None
    assert layout.document[0].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_begin_at_zero(side: str) -> None:
    """transformers #22161, unsloth #3795: positions under left padding."""
    layout = Layout.padded([3, 1], side=side)
    assert layout.valid is not None
    for row, length in enumerate((3, 1)):
        real = layout.positions[row, layout.valid[row], 0]
        assert real.tolist() == list(range(length))


def test_image_is_in_raster_order_after_its_special_tokens() -> None:
    layout = Layout.image(2, 3, prefix=1)
    assert layout.extent == (2, 3)
    cells = [[0, 0], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert layout.positions[0].tolist() == cells
    assert layout.special is not None
    assert layout.special[0].tolist() == [True] + [False] * 6
    masked = Layout.image(1, 2, prefix=1, valid=torch.tensor([[[True, False]]]))
    assert masked.valid is not None
    assert masked.valid.tolist() == [[True, True, False]]


def test_cells_are_in_raster_order_at_coordinates_of_each_axis() -> None:
    layout = Layout.cells(2, 1, 2, coordinates=("indices", "ends", "midpoints"), prefix=1)
    places = [[0, 0, 0], [0, -1, -0.5], [0, -1, 0.5], [1, -1, -0.5], [1, -1, 0.5]]
    assert layout.positions[0].tolist() == places
    assert layout.special is not None
    assert layout.special[0].tolist() == [True] + [False] * 4
    for cells, centred, ends in ((4, [-2, -1, 0, 1], 1 / 3), (5, [-3, -2, -1, 0, 1], 0.5)):
        assert Layout.cells(cells, coordinates="centred").positions.flatten().tolist() == centred
        evenly = Layout.cells(cells, coordinates="ends").positions.flatten()
        torch.testing.assert_close(evenly, torch.linspace(-1, 1, cells))
        assert evenly[-2].item() == pytest.approx(ends)
    assert torch.equal(Layout.cells(2, 3).positions, Layout.image(2, 3).positions)


def test_at_takes_any_real_times() -> None:
    """x-transformers #299: positions of one's own."""
    assert Layout.at(torch.tensor([0.5, -3.0])).positions.shape == (1, 2, 1)
    assert Layout.at(torch.zeros(3, 4)).batch == 3
    assert Layout.at(torch.zeros(3, 4, 2)).axes == 2
    assert Layout.at(torch.arange(3)).positions.dtype == torch.float32
    times = torch.tensor([0.0, 1.5], requires_grad=True)
    Layout.at(times).positions.sum().backward()
    assert times.grad is not None


@pytest.mark.parametrize("start", [0, 2**24 - 2, 2**24 + 1, -(2**30), 2**53 - 3])
def test_neighbours_never_merge(start: int) -> None:
    """float32 cannot tell 2^24 from 2^24 + 1."""
    given = Layout.at(torch.arange(start, start + 4))
    for layout in (Layout.sequence(4, start), given, given.slice(0, 3).concat(given.slice(3, 4))):
        assert layout.positions.flatten().long().tolist() == list(range(start, start + 4))
        assert (layout.positions.dtype == torch.float64) == (abs(start) > 2**23)


def test_the_next_position_is_another_one() -> None:
    for layout in (Layout.sequence(2, 2**24 - 1), Layout.at(torch.tensor([2**24 - 1, 2**24]))):
        assert int(layout.following().positions) == 2**24 + 1
        assert int(layout.following().following().positions) == 2**24 + 2


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63)])
def test_integers_that_no_float_holds_are_refused(value: int) -> None:
    for make in (lambda: Layout.at(torch.tensor([value])), lambda: Layout.sequence(2, value)):
        with pytest.raises(ArgumentError, match=r"up to 2\^53.*Subtract"):
            make()


@pytest.mark.parametrize(
    "layout",
    [Layout.packed([2, 1, 4]), *(Layout.padded([4, 7], side=s) for s in ("left", "right"))],
)
def test_documents_are_known_to_be_consecutive(layout: Layout) -> None:
    rows = torch.tensor([0])
    for same in (layout, layout.slice(1, 6), layout.select(rows), layout.to("meta")):
        assert same.consecutive
    for changed in (
        layout.with_positions(2 * layout.positions),
        take(layout, torch.tensor([0, 3])),
    ):
        assert not changed.consecutive
    assert not layout.concat(layout).consecutive


def test_slices_of_regular_layouts_are_regular() -> None:
    part = Layout.sequence(9, start=2).slice(4, 7)
    assert part.start == 6
    assert part.order[0].tolist() == [6, 7, 8]
    assert Layout.image(2, 3).slice(0, 4).extent is None
    documents = Layout.packed([2, 3]).slice(1, 4).document
    assert documents is not None
    assert documents.tolist() == [[0, 1, 1]]


def test_other_positions_are_not_taken_to_be_regular() -> None:
    for layout in (Layout.sequence(6), Layout.image(2, 3)):
        moved = layout.with_positions(2 * layout.positions)
        assert (moved.start, moved.extent) == (None, None)
        assert torch.equal(moved.order, layout.order)


def test_following_goes_on_from_the_last_token() -> None:
    assert Layout.sequence(3, start=2).following().start == 5
    after = Layout.padded([3, 1], side="left").following()
    assert after.positions[:, 0, 0].tolist() == after.order[:, 0].tolist() == [3, 1]
    assert after.valid is None
    packed = Layout.packed([2, 3]).following()
    assert packed.positions.item() == 3
    assert packed.document is not None
    assert packed.document.item() == 1
    beyond = Layout.image(2, 3).following()
    assert beyond.positions[0, 0].tolist() == [3, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_positions_that_are_no_numbers(value: float) -> None:
    with pytest.raises(ArgumentError, match="finite"):
        Layout.at(torch.tensor([0.0, value]))
    with pytest.raises(ArgumentError, match="finite"):
        Layout(torch.tensor([[[value]]]), torch.zeros(1, 1).long())


SECONDS = 1.7e9 + 60.0 * torch.arange(6, dtype=torch.float64)
DAYS = 2_460_000.5 + 0.01 * torch.arange(60, dtype=torch.float64)


@pytest.mark.parametrize("times", [SECONDS, SECONDS[:1], DAYS, torch.stack([0.0 * DAYS, DAYS])])
def test_times_that_float32_merges_are_refused(times: Tensor) -> None:
    """Unix seconds are 128 apart in float32, Julian days a quarter of a day."""
    with pytest.raises(ArgumentError, match="times: expected float32 times that are more"):
        Layout.at(times.float())
    for kept in (times, (times - times.amin(-1, keepdim=True)).float()):
        assert torch.equal(Layout.at(kept).positions.flatten(), kept.flatten())


def test_times_that_float32_tells_apart_are_taken() -> None:
    torch.manual_seed(0)
    for times in (
        torch.full((5,), 0.7),
        torch.rand(3, 1000, 2),
        torch.arange(2**24 - 4, 2**24 + 1).float(),
        torch.tensor([7e6, 7e6, 7e6 + 0.5, 7e6 + 2]),
        torch.tensor([1.0, 1.0 + 2**-23]),
    ):
        assert torch.equal(Layout.at(times).positions.flatten(), times.flatten())


@pytest.mark.parametrize("missing", [torch.nan, torch.inf, -(2.0**63)])
def test_times_of_padding_may_hold_anything(missing: float) -> None:
    """Those of pandas' missing dates are -2^63."""
    valid = torch.tensor([[True, True, False], [True, False, False]])
    whole = torch.tensor([[3, 9, 0], [4, 0, 0]])
    kinds = [torch.float32, torch.float64, *([torch.int64] if missing == -(2.0**63) else [])]
    for times in (whole.to(kind).masked_fill(~valid, missing) for kind in kinds):
        layout = Layout.at(times, valid=valid)
        assert layout.positions.squeeze(-1).tolist() == whole.tolist()
    with pytest.raises(ArgumentError, match="finite"):
        Layout.at(torch.tensor([torch.nan, 1.0]), valid=torch.tensor([[True, True]]))
    for wrong in (torch.ones(3, 3).bool(), torch.ones(2, 2).bool(), torch.ones(2, 3)):
        with pytest.raises(ArgumentError, match=r"valid|batch"):
            Layout.at(torch.zeros(2, 3), valid=wrong)


def test_narrow_positions_are_refused() -> None:
    """transformers #25681, Megatron #744: bfloat16 positions collide from 257 on."""
    with pytest.raises(ArgumentError, match="in bfloat16, 257 is 256"):
        Layout.at(torch.arange(4).bfloat16())


BAD = [
    (lambda: Layout(torch.zeros(3), torch.zeros(1, 3).long()), "positions"),
    (lambda: Layout(torch.zeros(1, 3, 1), torch.zeros(1, 4).long()), "order"),
    (lambda: Layout(torch.zeros(1, 3, 1), torch.zeros(1, 3)), "order: expected torch.int64"),
    (lambda: Layout(torch.zeros(2, 3, 1), torch.zeros(3, 3).long()), "equal batch sizes"),
    (lambda: Layout.sequence(0), "length"),
    (lambda: Layout.sequence(2.5), "length: expected a whole number"),  # type: ignore[arg-type]
    (lambda: Layout.at([1.0]), "times: expected a tensor"),  # type: ignore[arg-type]
    (lambda: Layout.from_attention_mask([[1]]), "mask: expected a"),  # type: ignore[arg-type]
    (lambda: Layout([[1.0]], [[0]]), "positions: expected a tensor"),  # type: ignore[arg-type]
    (lambda: Layout.padded([]), "lengths: expected one length per row"),
    (lambda: Layout.padded([1.5], 2), "a whole number, 0 or more"),  # type: ignore[list-item]
    (lambda: Grid.of(Layout.sequence(2), window=1.5), "window"),  # type: ignore[arg-type]
    (lambda: Layout.packed([]), "lengths"),
    (lambda: Layout.padded([4], 3), "lengths"),
    (lambda: Layout.padded([4], side="top"), "side"),
    (lambda: Layout.image(2, 2, valid=torch.ones(1, 3, 2).bool()), "valid"),
    (lambda: Layout.cells(), "sizes"),
    (lambda: Layout.cells(2, 3, coordinates=("ends",)), "coordinates"),
    (lambda: Layout.at(torch.zeros(1, 1, 1, 1)), "times"),
    (lambda: Grid.of(Layout.sequence(2), window=0), "window"),
    (lambda: Grid(Layout.sequence(2), Layout.image(1, 2)), "equally many axes"),
    (lambda: Grid.of(Layout.at(torch.zeros(2))).distinct_offsets(), "regular layouts"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_wrong_arguments(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        make()


VISIBLE = {
    "causal": (Grid.of(Layout.sequence(3), causal=True), ["x..", "xx.", "xxx"]),
    "window": (Grid.of(Layout.sequence(4), window=2), ["xx..", "xxx.", ".xxx", "..xx"]),
    "both": (Grid.of(Layout.sequence(4), causal=True, window=2), ["x...", "xx..", ".xx.", "..xx"]),
    "packed": (Grid.of(Layout.packed([1, 2]), causal=True), ["x..", ".x.", ".xx"]),
    "packed after plain": (Grid(Layout.sequence(2), Layout.packed([1, 1])), ["x.", "x."]),
    "padded": (Grid.of(Layout.padded([1, 2])), ["x.", ".."]),
    "chunk": (Grid(Layout.sequence(2, 1), Layout.sequence(3), causal=True), ["xx.", "xxx"]),
}


@pytest.mark.parametrize(("grid", "picture"), VISIBLE.values(), ids=VISIBLE)
def test_visible(grid: Grid, picture: list[str]) -> None:
    seen = grid.visible[0, 0].tolist()
    assert ["".join("x" if cell else "." for cell in row) for row in seen] == picture


@pytest.mark.parametrize("rows", [(2, 3), (3, 2)])
def test_layouts_of_other_rows_are_not_joined(rows: tuple[int, int]) -> None:
    first, second = (Layout.padded([2] * count) for count in rows)
    with pytest.raises(ArgumentError, match=f"{rows[0]} rows as in the cached part, or 1"):
        first.concat(second)


def test_the_next_token_of_two_axes_follows_its_own_document() -> None:
    """The first document reaches farther than the last."""
    positions = torch.tensor([[[7.0, 9.0], [0.0, 0.0], [0.0, 1.0]]])
    order = torch.arange(3).expand(1, 3)
    layout = Layout(positions, order, document=torch.tensor([[0, 1, 1]]))
    assert layout.following().positions.tolist() == [[[2.0, 2.0]]]


def test_signals_are_given_to_the_same_tokens() -> None:
    layout = Layout.packed([3, 2])
    signal = torch.randn(1, 5, 2)
    signed = layout.with_signal(signal)
    assert signed.signal is signal
    assert signed.positions is layout.positions
    assert signed.document is layout.document
    assert signed.consecutive
    other = signed.with_signal(None)
    assert other.signal is None
    with pytest.raises(ArgumentError, match="signal"):
        layout.with_signal(torch.randn(1, 4, 2))
