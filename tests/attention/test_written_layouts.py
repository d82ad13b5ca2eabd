"""Layouts and intervals written in place after a call are read as they are in the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout, attend
from posenc.errors import ArgumentError, BackendRefusal

pytestmark = pytest.mark.usefixtures("entered")

LENGTH = 96
FIELDS = ("positions", "order", "document", "valid", "special")


def padded() -> Layout:
    """Rows with memory of their own, which can be written to."""
    layout = Layout.padded([LENGTH, 60])
    return replace(layout, positions=layout.positions.clone(), order=layout.order.clone())


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "padded": padded,
    "packed": lambda: Layout.packed([60, LENGTH - 60]),
    "at times": lambda: Layout.at(torch.arange(float(LENGTH))),
    "not said to be consecutive": lambda: replace(Layout.packed([60, 36]), consecutive=False),
}

VALUES: dict[str, Callable[[Tensor], object]] = {
    "positions": lambda x: x.mul_(2),
    "order": lambda x: x.copy_(x.flip(1)),
    "document": lambda x: x[:, 40:].fill_(5),
    "valid": lambda x: x[:, 40:].fill_(False),
    "special": lambda x: x[:, :20].fill_(True),
    "intervals": lambda x: x.copy_(torch.tensor([0, 20])),
}

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: x,
    "data": lambda x: x.data,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
}


def fresh(grid: Grid) -> Grid:
    """The grid of other layouts with the same numbers, which claim nothing."""
    layout = grid.query
    tensors = {name: getattr(layout, name) for name in FIELDS}
    tensors = {name: None if x is None else x.clone() for name, x in tensors.items()}
    intervals = None if grid.intervals is None else grid.intervals.clone()
    layout = Layout(**tensors)
    return Grid(layout, layout, grid.causal, grid.window, intervals)


def moved(encoding: str, grid: Grid, backend: str, write: Callable[[], object]) -> float:
    """How far the output moves when something is written; it must be the definition's after it."""
    torch.manual_seed(0)
    made = posenc.create(encoding, dim=32, heads=2, max_length=LENGTH, causal=True).eval()
    q, k, v = torch.randn(3, grid.batch, 2, LENGTH, 16)
    with torch.no_grad():
        for _ in range(3):
            before = attend(q, k, v, grid, made, backend=backend)
        write()
        try:
            after = attend(q, k, v, grid, made, backend=backend)
        except BackendRefusal:  # what was written is no form of the backend's
            after = attend(q, k, v, grid, made)
        expected = attend(q, k, v, fresh(grid), made, backend="reference")
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-4)
    return float((after - before).abs().max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("backend", ["auto", "native", "sdpa", "blockwise"])
def test_written_layouts_are_read(backend: str, kind: str, way: str) -> None:
    for name in FIELDS:
        encoding = "rope" if backend == "sdpa" else "t5"
        grid = Grid.of(LAYOUTS[kind](), causal=True)
        x = getattr(grid.query, name)
        if x is not None:
            off = moved(encoding, grid, backend, lambda x=x, name=name: VALUES[name](WAYS[way](x)))
            assert off > 1e-3, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["auto", "native", "sdpa", "blockwise"])
def test_written_intervals_are_read(backend: str, way: str) -> None:
    encoding = "rope" if backend == "sdpa" else "t5"
    grid = Grid.of(Layout.sequence(LENGTH), causal=True).chunked(32)
    x = grid.intervals
    assert x is not None
    assert moved(encoding, grid, backend, lambda: VALUES["intervals"](WAYS[way](x))) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_written_special_tokens_are_read(way: str) -> None:
    """Those that rope leaves as they are."""
    grid = Grid.of(Layout.sequence(LENGTH - 1, prefix=1), causal=True)
    x = grid.query.special
    assert x is not None
    assert moved("rope", grid, "auto", lambda: VALUES["special"](WAYS[way](x))) > 1e-3


def test_times_that_were_given_may_be_written() -> None:
    times = torch.arange(float(LENGTH))
    grid = Grid.of(Layout.at(times), causal=True)
    assert moved("rope", grid, "auto", lambda: times.data.mul_(0.5)) > 1e-3


def test_positions_that_left_a_table_are_refused() -> None:
    layout = Layout.at(torch.arange(8.0))
    encoding = posenc.create("learned", dim=16, max_length=8)
    x = torch.zeros(1, 8, 16)
    encoding.embed(x, layout)
    layout.positions.data += 1
    with pytest.raises(ArgumentError) as refused:
        encoding.embed(x, layout)
    assert refused.value.argument == "positions"


@pytest.mark.parametrize(
    ("layout", "name", "argument"),
    [
        (Layout.sequence(LENGTH), "positions", "start"),
        (Layout.sequence(LENGTH), "order", "start"),
        (Layout.image(8, 12), "positions", "extent"),
    ],
)
def test_layouts_that_are_no_longer_what_they_claim_are_refused(
    layout: Layout, name: str, argument: str
) -> None:
    """``start`` and ``extent`` are read in place of the numbers."""
    q = torch.randn(1, 2, LENGTH, 16)
    with torch.no_grad():
        for _ in range(3):
            attend(q, q, q, Grid.of(layout), posenc.Encoding())
        getattr(layout, name).data.mul_(2)
        with pytest.raises(ArgumentError) as refused:
            attend(q, q, q, Grid.of(layout), posenc.Encoding())
    assert refused.value.argument == argument
