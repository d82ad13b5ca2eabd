"""Biases by distance and time against loops, numbers by hand, and seconds since 1970."""

from __future__ import annotations

import math

import pytest
import torch

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.time_buckets import TimeBuckets
from posenc.errors import ArgumentError
from tests.encodings.grids import inputs
from tests.encodings.image_grids import IMAGES

DAY = 86_400.0


def events(*times: float, dtype: torch.dtype = torch.float64) -> Layout:
    """Events in order, at these times."""
    places = [(float(place), time) for place, time in enumerate(times)]
    return Layout.at(torch.tensor([places], dtype=dtype))


def make(heads: int = 6, **options: float) -> TimeBuckets:
    torch.manual_seed(1)
    part = posenc.create("time_buckets", heads=heads, **options).score
    assert isinstance(part, TimeBuckets)
    return part.double().requires_grad_(False)


GRIDS = {
    **IMAGES,
    "events": Grid.of(events(0.0, 1.5, 4.0, 4.0, 3 * DAY, 400 * DAY), causal=True),
    "since 1970": Grid.of(events(1.7e9, 1.7e9 + 1, 1.7e9 + 60, 1.7e9 + 30 * DAY)),
}


@pytest.mark.parametrize("options", [{}, {"max_distance": 1, "buckets": 8, "step": 0.7}])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, options: dict[str, float]) -> None:
    q, k, v = inputs(grid)
    part = make(**options)
    limit, last, step = part.max_distance, part.buckets, part.step
    got = part(q, k, grid, scale=1.0)
    expected = torch.zeros_like(got)
    for b, i, j in torch.cartesian_prod(*map(torch.arange, (len(got), *got.shape[2:]))):
        if any(
            side.special is not None and side.special[0, at]
            for side, at in ((grid.query, i), (grid.key, j))
        ):
            continue
        query = grid.query.positions[b % len(grid.query.positions), i].tolist()
        key = grid.key.positions[b % len(grid.key.positions), j].tolist()
        place = max(-limit, min(limit, round(key[0] - query[0]))) + limit
        time = min(last, math.floor(math.log(max(1.0, abs(key[1] - query[1]))) / step))
        expected[b, :, i, j] = part.places[:, place] + part.times[:, time]
    torch.testing.assert_close(got, expected)
    by_definition, *others = (
        attend(q, k, v, grid, Encoding(score=part), backend=backend)
        for backend in ("reference", "blockwise", "auto")
    )
    for other in others:
        torch.testing.assert_close(other, by_definition)


def test_buckets_by_hand() -> None:
    """ln 1 = 0, ln 2 / 0.301 = 2.30, ln 60 / 0.301 = 13.6, ln 86400 / 0.301 = 37.76."""
    offsets = torch.tensor([[0, 0], [0, 1], [0, 2], [0, -60], [0, DAY]], dtype=torch.float64)
    assert make().time_bucket(offsets).tolist() == [0, 0, 2, 13, 37]


def test_seconds_since_1970_are_told_apart_in_float64() -> None:
    part = make()
    times = (1.7e9, 1.7e9 + 1, 1.7e9 + 2, 1.7e9 + 60)
    exact = part.time_bucket(Grid.of(events(*times)).offset)
    assert exact[0, 0].tolist() == [0, 0, 2, 13]
    with pytest.raises(ArgumentError, match="float64"):
        events(*times, dtype=torch.float32)


def test_the_time_of_the_next_event_as_that_of_a_query() -> None:
    """As in HSTU's code: queries at the times of what they predict, keys at their own."""
    times = (0.0, 10.0, 100.0)
    queries, keys = events(*times[1:], times[-1]), events(*times)
    buckets = make().time_bucket(Grid(queries, keys, causal=True).offset)[0]
    differences = [[10, 0, 90], [100, 90, 0], [100, 90, 0]]
    expected = [[math.floor(math.log(max(1, d)) / 0.301) for d in row] for row in differences]
    assert buckets.tolist() == expected
