"""Grids with bands, chunks, blocks and intervals of keys, in every backend that takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.backends.native.build import missing
from posenc.errors import ArgumentError, BackendRefusal
from posenc.testing.oracles import attention_by_loops

LENGTH = 23
SEQUENCE = Layout.sequence(LENGTH, start=3)
BLOCKS = torch.tensor([[-1] * 4 + [0] * 7 + [1] * 5 + [-1] * 7, [5] * 9 + [-1] * 14])
GRIDS: dict[str, Grid] = {
    "ahead": Grid.of(SEQUENCE, window=(-5, 2)),
    "strictly before": Grid.of(SEQUENCE, window=(-7, -2)),
    "after": Grid.of(SEQUENCE, window=(1, None)),
    "all before": Grid.of(SEQUENCE, window=(None, 3)),
    "chunks": Grid.of(SEQUENCE, causal=True).chunked(6),
    "chunks in a cache": Grid(SEQUENCE.slice(20, 23), SEQUENCE, True).chunked(8),
    "packed": Grid.of(Layout.packed([9, 14]), window=(-3, 1)),
    "padded": Grid.of(Layout.padded([23, 11], side="left"), causal=True).chunked(5),
    "images": Grid.of(SEQUENCE, causal=True, window=4).with_blocks(BLOCKS),
    "prefix": Grid.of(Layout.sequence(LENGTH), causal=True).with_blocks(BLOCKS[1:]),
    "window in chunks": Grid.of(SEQUENCE, window=(-3, 3)).chunked(4),
    "two chunks": Grid.of(SEQUENCE, causal=True).chunked(9).chunked(6),
}


def _tensors(grid: Grid) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, grid.query.length, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8))
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in sizes
    )


@pytest.mark.parametrize("name", GRIDS)
def test_values_and_gradients_are_the_definition_s(name: str) -> None:
    grid = GRIDS[name]
    q, k, v = _tensors(grid)
    bias = create("alibi", heads=4)
    exact = attention_by_loops(q, k, v, grid, bias=_alibi)
    expected = attend(q, k, v, grid, bias, backend="reference")
    torch.testing.assert_close(expected, exact, atol=1e-6, rtol=0)
    gradients = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for backend in ("native", "blockwise", "sdpa"):
        try:
            output = attend(q, k, v, grid, bias, backend=backend)
        except BackendRefusal:
            # SDPA takes no documents beside a table.
            assert backend == "sdpa" or (backend == "native" and missing())
            continue
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
        for mine, theirs in zip(
            torch.autograd.grad(output.sin().sum(), (q, k, v)), gradients, strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def _alibi(head: int, row: int, query: float, key: float) -> float:
    return -(2.0 ** (-2 * (head + 1))) * abs(key - query)


def test_a_window_that_ends_at_the_query_is_causal() -> None:
    assert Grid.of(SEQUENCE, window=(-4, 0)).causal
    assert Grid.of(SEQUENCE, window=(-4, 0)).band == Grid.of(SEQUENCE, causal=True, window=5).band
    assert Grid.of(SEQUENCE, window=(None, None)).window is None


def test_intervals_are_shown() -> None:
    assert "intervals=…" in repr(GRIDS["chunks"])
    assert "window=(-5, 2)" in repr(GRIDS["ahead"])


WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "reversed": ("window", lambda: Grid.of(SEQUENCE, window=(3, 2))),
    "three": ("window", lambda: Grid.of(SEQUENCE, window=(1, 2, 3))),  # type: ignore[arg-type]
    "real": ("window", lambda: Grid.of(SEQUENCE, window=(0.5, 2))),  # type: ignore[arg-type]
    "chunk": ("size", lambda: Grid.of(SEQUENCE).chunked(0)),
    "blocks": ("blocks", lambda: Grid.of(SEQUENCE).with_blocks(BLOCKS[:, 1:])),
    "far": ("grid", lambda: Grid.of(SEQUENCE, window=(5, 9)).with_blocks(BLOCKS)),
    "twice": ("grid", lambda: GRIDS["images"].with_blocks(BLOCKS)),
    "dtype": ("intervals", lambda: Grid(SEQUENCE, SEQUENCE, intervals=torch.zeros(1, LENGTH, 2))),
    "shape": (
        "intervals",
        lambda: Grid(SEQUENCE, SEQUENCE, intervals=torch.zeros(1, 5, 2, dtype=torch.int64)),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument(case: str) -> None:
    name, make = WRONG[case]
    with pytest.raises(ArgumentError, match=name):
        make()


def test_rows_of_intervals_have_to_fit_the_batch() -> None:
    grid = Grid(SEQUENCE, SEQUENCE, intervals=torch.zeros(3, LENGTH, 2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"grid\.intervals"):
        attend(*_tensors(grid), grid, Encoding())
