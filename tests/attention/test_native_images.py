"""The compiled kernels' terms between the cells of images, against the reference."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc.attention import attend, explain
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm, TokenTableProduct
from posenc.encodings.common.buckets import gather_rows
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import agree, built, cast, compare, draw, results
from tests.support.exhaustive import in_turn
from tests.support.watching import LargestTensor

pytestmark = [built, pytest.mark.usefixtures("poisoned")]

PAIRS = [
    ((5, 7), (5, 7)),
    ((5, 7), (3, 20)),
    ((3, 130), (9, 70)),
    ((20, 9), (1, 1)),
    ((82, 8), (82, 8)),
    ((3, 127), (2, 20)),
]
"""Blocks of queries that are parts of image rows and several of them; more than a tile of keys."""


def narrow_agrees(grid: Grid, encoding: Encoding, dtype: torch.dtype, tolerance: float) -> None:
    """Compare with the definition in float64 of the same numbers."""
    given = draw(grid.query.length, grid.key.length, dtype=dtype)
    expected = results(cast(given, torch.float64), grid, encoding, "reference")
    agree(results(given, grid, encoding.float(), "native"), expected, tolerance)


@pytest.mark.parametrize("cells", [(5, 7), (16, 16)])
def test_tables_of_images(cells: tuple[int, int]) -> None:
    torch.manual_seed(0)
    encoding = posenc.create("swin", heads=4, window=cells)
    torch.nn.init.normal_(next(encoding.parameters()))
    grid = Grid.of(Layout.image(*cells))
    compare(draw(grid.query.length, grid.key.length), grid, encoding, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), PAIRS)
def test_rows_by_axis_of_images(
    queries: tuple[int, int], keys: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    encoding = posenc.create("decomposed2d", head_dim=24, size=(82, 130)).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    grid = Grid(Layout.image(*queries), Layout.image(*keys))
    narrow_agrees(grid, encoding, dtype, 1e-4 if dtype == torch.float32 else 0.04)


def test_rows_by_axis_take_no_memory_for_each_query() -> None:
    encoding = posenc.create("decomposed2d", head_dim=2, size=(16, 16))
    inputs = draw(256, 256, width=2)
    with LargestTensor() as memory:
        output = attend(*inputs, Grid.of(Layout.image(16, 16)), encoding, backend="native")
        output.sum().backward()
    assert memory.most == inputs[0].numel()


def _irpe(**options: object) -> Encoding:
    torch.manual_seed(0)
    encoding = posenc.create("irpe", heads=4, head_dim=24, **options).double()
    for parameter in encoding.parameters():
        nn.init.normal_(parameter, std=0.3)
    return encoding


@pytest.mark.parametrize(
    ("queries", "keys", "method", "on", "shared"),
    in_turn(
        4, PAIRS, ["product", "cross", "euclidean", "quantised"], ["k", "q", "qkv"], [True, False]
    ),
)
def test_rows_by_bucket_of_images(
    queries: tuple[int, int], keys: tuple[int, int], method: str, on: str, shared: bool
) -> None:
    """iRPE: rows by a bucket of both axes for queries, keys and values, in any combination."""
    encoding = _irpe(method=method, on=on, shared_heads=shared)
    grid = Grid(Layout.image(*queries), Layout.image(*keys))
    inputs = draw(grid.query.length, grid.key.length, dtype=torch.float64)
    compare(inputs, grid, encoding, tolerance=1e-11)


@pytest.mark.parametrize(("queries", "keys"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_by_bucket_in_narrow_numbers(
    queries: tuple[int, int], keys: tuple[int, int], dtype: torch.dtype
) -> None:
    encoding, grid = _irpe(on="qkv"), Grid(Layout.image(*queries), Layout.image(*keys))
    narrow_agrees(grid, encoding, dtype, 1e-4 if dtype == torch.float32 else 0.06)


class Scattered(ScoreTerm):
    """A row for each bucket of the two offsets, which follow no order."""

    axes = (2,)

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, buckets, 24) * 0.3)
        self.table = nn.Parameter(torch.randn(4, buckets))

    def bucket(self, offset: Tensor) -> Tensor:
        down, across = offset.long().unbind(-1)
        return (down * 31 + across * 17 + down * across).remainder(self.rows.shape[1])

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        index = self.bucket(grid.offset)
        products = gather_rows(q * scale, self.rows, index)
        return products + self.table[:, index].transpose(0, 1)

    def lower(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> tuple[BucketedTerms, ...]:
        left = TokenTableProduct(q * scale, self.rows)
        return (BucketedTerms(self.bucket, table=self.table, left=left),)


@pytest.mark.parametrize("buckets", [90, 2000])
@pytest.mark.parametrize(("rows", "columns"), [(6, 19), (1, 150)])
def test_buckets_in_any_order(buckets: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    encoding = Encoding(score=Scattered(buckets))
    grid = Grid(Layout.image(rows, columns), Layout.image(9, 61))
    compare(draw(grid.query.length, grid.key.length), grid, encoding, tolerance=1e-4)


def test_dropout_of_rows_by_bucket_of_images() -> None:
    """A mask hides the same weights in both passes: the gradient is that of the output."""
    encoding = _irpe(on="qkv")
    grid = Grid.of(Layout.image(5, 6))
    q, k, v = (x.detach().double() for x in draw(30, 30))
    rows = next(encoding.parameters())

    def loss() -> Tensor:
        torch.manual_seed(7)
        output = attend(q, k, v, grid, encoding, backend="native", dropout=0.4)
        return output.square().sum()

    (slope,) = torch.autograd.grad(loss(), rows)
    step, direction = 1e-6, torch.randn_like(rows)
    with torch.no_grad():
        rows += step * direction
        up = loss()
        rows -= 2 * step * direction
        down = loss()
    torch.testing.assert_close(
        (up - down) / (2 * step), (slope * direction).sum(), rtol=1e-5, atol=0
    )


def test_auto_takes_the_kernels_for_irpe() -> None:
    q, k, v = draw(256, 256)
    encoding = posenc.create("irpe", heads=4, head_dim=24)
    assert "image offset" in str(explain(q, k, v, Grid.of(Layout.image(16, 16)), encoding))
    masked = Layout.image(16, 16, valid=torch.arange(256).view(1, 16, 16) < 250)
    assert explain(q, k, v, Grid.of(masked), encoding).backend != "native"


@pytest.mark.parametrize(("before", "keys_before"), [(1, 1), (2, 3), (0, 2), (3, 0)])
@pytest.mark.parametrize("name", ["irpe", "swin", "decomposed2d", "rope2d+irpe"])
def test_special_tokens_before_images(name: str, before: int, keys_before: int) -> None:
    """Pairs with a class token are computed apart and joined, in values, LSE and gradients."""
    torch.manual_seed(0)
    options = {
        "irpe": {"on": "qkv", "heads": 4, "head_dim": 24},
        "swin": {"window": (9, 9), "heads": 4},
        "decomposed2d": {"head_dim": 24, "size": (9, 9)},
        "rope2d+irpe": {"heads": 4, "head_dim": 24},
    }[name]
    encoding = posenc.create(name, **options).double()  # type: ignore[arg-type]
    for parameter in encoding.parameters():
        nn.init.normal_(parameter, std=0.3)
    query, key = Layout.image(6, 8, prefix=before), Layout.image(9, 7, prefix=keys_before)
    grid, inputs = Grid(query, key), draw(query.length, key.length, dtype=torch.float64)
    assert "special tokens apart" in str(explain(*inputs, grid, encoding, backend="native"))
    compare(inputs, grid, encoding, tolerance=1e-10)


def test_what_is_kept_of_special_tokens_goes_with_their_layout() -> None:
    encoding, layout = posenc.create("irpe", heads=4, head_dim=24), Layout.image(6, 8, prefix=1)
    q, k, v = draw(49, 49)
    attend(q, k, v, Grid.of(layout), encoding, backend="native")
    alive = ref(layout)
    del layout
    gc.collect()
    assert alive() is None


class Signalled(ScoreTerm):
    """A row of each offset, as far as the query's signal says."""

    axes = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.index = posenc.create("swin", window=(9, 9), heads=4).score.offsets.index
        self.rows = nn.Parameter(torch.randn(1, 289, 1))

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        rows = self.rows[0, :, 0][self.index(grid.offset)]
        for side, axis in ((grid.query, 2), (grid.key, 1)):
            if side.special is not None:
                rows = rows.masked_fill(side.special.unsqueeze(axis), 0.0)
        return self._signal(grid) * rows.unsqueeze(1)

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[BucketedTerms] | None:
        if grid.key.special is not None:
            return None
        return (BucketedTerms(self.index, left=TokenTableProduct(self._signal(grid), self.rows)),)

    def _signal(self, grid: Grid) -> Tensor:
        assert grid.query.signal is not None
        return grid.query.signal.mT.unsqueeze(-1)


def test_signals_of_cells_behind_special_tokens_are_those_of_the_call() -> None:
    encoding, layout = Encoding(score=Signalled()), Layout.image(6, 8, prefix=1)
    q, k, v = (x.detach() for x in draw(49, 49))
    for signal in torch.randn(2, 1, 49, 4):
        grid = Grid.of(layout.with_signal(signal))
        assert "special tokens apart" in str(explain(q, k, v, grid, encoding, backend="native"))
        got, expected = (
            attend(q, k, v, grid, encoding, backend=b) for b in ("native", "reference")
        )
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_many_special_tokens_and_masks_are_left_alone() -> None:
    encoding = posenc.create("irpe", heads=4, head_dim=24)
    seen = torch.arange(48).view(1, 6, 8) < 40
    for layout in (Layout.image(6, 8, prefix=40), Layout.image(6, 8, prefix=1, valid=seen)):
        q, k, v = draw(layout.length, layout.length)
        with pytest.raises(BackendRefusal, match="whole stretches"):
            attend(q, k, v, Grid.of(layout), encoding, backend="native")
