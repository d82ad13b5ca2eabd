"""Layouts at other positions: order and marks kept, reproducible, as the papers say."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import Grid, Layout, attend
from posenc.errors import ArgumentError
from posenc.layout.transforms import fitted, interpolated, randomized, skipped


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def line(layout: Layout) -> list[float]:
    return layout.positions[0, :, 0].tolist()


def test_randomized_is_a_sorted_sample_without_replacement() -> None:
    places = line(randomized(Layout.sequence(20), max_length=50, generator=seeded()))
    assert places == sorted(set(places))
    assert places[0] >= 0
    assert places[-1] < 50
    everything = line(randomized(Layout.sequence(20), max_length=20))
    assert everything == list(range(20))


def test_randomized_reaches_every_place() -> None:
    generator = seeded()
    seen = set()
    for _ in range(300):
        seen |= set(line(randomized(Layout.sequence(5), max_length=12, generator=generator)))
    assert seen == set(range(12))


@pytest.mark.parametrize("transform", [randomized, skipped])
def test_reproducible_from_a_generator(transform) -> None:  # type: ignore[no-untyped-def]
    def draw(seed: int) -> list[float]:
        return line(transform(Layout.sequence(30), max_length=500, generator=seeded(seed)))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_rows_and_documents_share_the_sample() -> None:
    packed = randomized(Layout.packed([3, 4]), max_length=40, generator=seeded())
    assert line(packed)[:3] == line(packed)[3:6]
    padded = randomized(Layout.padded([4, 2], side="left"), max_length=40, generator=seeded())
    assert padded.positions[1, 2:, 0].tolist() == padded.positions[0, :2, 0].tolist()
    assert padded.valid is not None


def test_skipped_is_chunks_with_growing_skips() -> None:
    generator = seeded()
    ends = set()
    for _ in range(200):
        places = torch.tensor(
            line(skipped(Layout.sequence(10), max_length=100, chunks=3, generator=generator))
        )
        steps = places.diff()
        assert places[0] == 0
        assert (steps >= 1).all()
        assert int((steps > 1).sum()) <= 2
        assert places[-1] < 100
        ends.add(places[-1].item())
    assert max(ends) > 90


def test_skipped_begins_anywhere_and_reaches_every_place() -> None:
    generator, three = seeded(), Layout.sequence(3)
    drawn = {tuple(line(skipped(three, max_length=5, generator=generator))) for _ in range(200)}
    assert drawn == {(0, 1, 2), (0, 1, 3), (0, 1, 4), (0, 2, 3), (0, 3, 4)}
    assert line(skipped(three, max_length=3)) == [0, 1, 2]


def test_one_chunk_skips_nothing() -> None:
    assert line(skipped(Layout.sequence(6), max_length=50, chunks=1)) == list(range(6))


def test_interpolated_divides() -> None:
    assert line(interpolated(Layout.sequence(4), factor=2)) == [0.0, 0.5, 1.0, 1.5]
    same = interpolated(Layout.sequence(4), factor=1)
    rope = posenc.create("rope", head_dim=8)
    q = torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(
        attend(q, q, q, Grid.of(same), rope), attend(q, q, q, Grid.of(Layout.sequence(4)), rope)
    )


def test_order_is_kept_so_causality_is() -> None:
    moved = randomized(Layout.sequence(6), max_length=99, generator=seeded())
    seen = Grid.of(moved, causal=True).visible
    assert torch.equal(seen, Grid.of(Layout.sequence(6), causal=True).visible)
    assert moved.start is None


BAD = [
    (lambda: randomized(Layout.sequence(9), max_length=8), "max_length"),
    (lambda: skipped(Layout.sequence(9), max_length=8), "max_length"),
    (lambda: skipped(Layout.sequence(9), max_length=20, chunks=0), "chunks"),
    (lambda: skipped(Layout.sequence(9), max_length=20, chunks=10), "chunks"),
    (lambda: randomized(Layout.at(torch.tensor([0.5])), max_length=8), "integer positions"),
    (lambda: randomized(Layout.sequence(3, start=-1), max_length=8), "integer positions"),
    (lambda: randomized(Layout.image(2, 2), max_length=8), "one axis"),
    (lambda: interpolated(Layout.sequence(3), factor=0.0), "factor"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_wrong_arguments(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=message):
        make()


def test_fitted_images_meet_the_edges_of_the_trained_one() -> None:
    layout = fitted(Layout.image(4, 2, prefix=1), cells=(2, 2))
    assert layout.positions[0, 1::2, 0].tolist() == [0.0, 0.25, 0.75, 1.0]
    assert layout.positions[0, 1:3, 1].tolist() == [0.0, 1.0]
    assert layout.positions[0, 0].tolist() == [0.0, 0.0]
    assert layout.extent is None


def test_fitting_to_the_same_size_changes_no_position() -> None:
    layout = Layout.image(3, 5)
    assert torch.equal(fitted(layout, cells=(3, 5)).positions, layout.positions)


def test_only_whole_images_are_fitted() -> None:
    with pytest.raises(ArgumentError, match="whole image"):
        fitted(Layout.sequence(4), cells=(2, 2))
    with pytest.raises(ArgumentError, match="cells"):
        fitted(Layout.image(2, 2), cells=(0, 2))


def test_positions_drawn_from_a_long_range_stay_distinct() -> None:
    layout = skipped(Layout.sequence(64), max_length=2**40, generator=torch.manual_seed(0))
    positions = layout.positions.flatten()
    assert (positions.diff() >= 1).all()
    assert (positions == positions.round()).all()
