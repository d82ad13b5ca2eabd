"""Kernels beyond one tile of keys or queries: slots, parts of sums, carries, masks of dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout
from posenc.attention.problem.lowering import GivenTerms, GivenValues
from posenc.encoding import BucketedTerms, LowRank, TokenTableProduct
from tests.attention.comparing import built, results

pytestmark = built

WIDTH = 5


def draw(*size: int) -> Tensor:
    return (0.5 * torch.randn(*size)).requires_grad_()


def terms(
    batch: int, count: int, grid: Grid, clip: int, width: int, *, values: bool
) -> tuple[Encoding, list[Tensor]]:
    """Every structured term with rows for offsets up to ``clip``, and its tensors."""
    queries, keys = grid.query.length, grid.key.length

    def bucket(offset: Tensor) -> Tensor:
        return offset[..., 0].long().clamp(-clip, clip) + clip

    tensors = [
        draw(count, 2 * clip + 1),
        draw(batch, count, queries, width),
        draw(1, 2 * clip + 1, width),
        draw(batch, count, keys, width),
        draw(count, 2 * clip + 1, width),
        draw(1, count, keys),
        draw(batch, count, queries, 2),
        draw(1, count, keys, 2),
    ]
    table, queried, query_rows, keyed, key_rows, column, *factors = tensors
    score = GivenTerms(
        BucketedTerms(
            bucket,
            table=table,
            left=TokenTableProduct(queried, query_rows),
            right=TokenTableProduct(keyed, key_rows),
            column=column,
        ),
        LowRank(*factors),
    )
    if not values:
        return Encoding(score=score), tensors
    rows = draw(1, 2 * clip + 1, WIDTH)
    value = GivenValues(BucketedTerms(bucket, value=rows))
    return Encoding(score=score, value=value), [*tensors, rows]


def compare(
    grid: Grid, encoding: Encoding, tensors: list[Tensor], *sizes: int, width: int = WIDTH
) -> None:
    """Hold output and gradients of native to the definition's; sizes: rows, heads, key heads."""
    rows, count, groups = sizes
    q = draw(rows, count, grid.query.length, width)
    k, v = (draw(rows, groups, grid.key.length, width) for _ in range(2))
    found = (
        results((q, k, v), grid, encoding, backend, wanted=tensors, lse=False)
        for backend in ("native", "reference")
    )
    for got, expected in zip(*found, strict=True):
        size = expected.abs().max().item() + 1e-3
        torch.testing.assert_close(got, expected, atol=4e-3 * size, rtol=0)


@pytest.mark.parametrize(
    ("length", "sizes", "clip", "width", "values"),
    [
        (1200, (1, 1, 1), 1199, WIDTH, True),  # one slot for three tiles of keys, five splits
        (1200, (1, 1, 1), 1199, 16, False),  # windows of the buckets
        (1200, (1, 1, 1), 40, 16, True),  # far offsets between tiles
        (300, (2, 2, 1), 20, WIDTH, True),  # parts by batch row and by queries, groups of heads
        (300, (5, 8, 4), 3, 16, True),
    ],
)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 100)])
def test_every_term(
    length: int,
    sizes: tuple[int, int, int],
    clip: int,
    width: int,
    window: int | None,
    *,
    values: bool,
    causal: bool,
) -> None:
    torch.manual_seed(0)
    grid = Grid.of(Layout.sequence(length), causal=causal, window=window)
    encoding, tensors = terms(*sizes[:2], grid, clip, width, values=values)
    compare(grid, encoding, tensors, *sizes)


@pytest.mark.parametrize("clip", range(64, 80))
def test_every_alignment_of_buckets_to_vectors(clip: int) -> None:
    """The last bucket of a panel of keys may be the first of a vector."""
    torch.manual_seed(0)
    grid = Grid.of(Layout.sequence(130))
    encoding, tensors = terms(1, 1, grid, clip, WIDTH, values=True)
    compare(grid, encoding, tensors, 1, 1, 1)


def batch_of(*layouts: Layout) -> Layout:
    """A batch of packed rows."""
    fields = ((x.positions, x.order, x.document) for x in layouts)
    positions, order, document = (torch.cat(field) for field in zip(*fields, strict=True))
    return Layout(positions, order, document)


def test_windows_of_buckets_where_one_row_is_packed() -> None:
    """From one query of a block to the next, offsets fall by more than a window holds."""
    torch.manual_seed(8)
    one, two = Layout.packed([1200]), Layout.packed([100, 1100])
    ends = two.slice(70, 100).concat(two.slice(830, 1200))
    query, key = batch_of(one.slice(800, 1200), ends), batch_of(one, two)
    part = posenc.create("shaw", head_dim=WIDTH, max_distance=1199).score
    encoding = Encoding(score=part).requires_grad_(False)
    torch.nn.init.normal_(next(encoding.parameters()), std=0.5)
    compare(Grid(query, key, True), encoding, [], 2, 1, 1)


@pytest.mark.parametrize(("length", "rows", "count"), [(1100, 1, 1), (600, 2, 4)])
@pytest.mark.parametrize("name", ["stick_breaking", "cope", "path", "grape_additive"])
def test_carries_between_tiles(name: str, length: int, rows: int, count: int) -> None:
    """In float32: sticks are broken within a tile, gates count over several."""
    torch.manual_seed(1)
    options: dict[str, dict[str, int]] = {
        "cope": {"head_dim": WIDTH, "max_count": 300},
        "path": {"dim": 2 * WIDTH, "heads": count, "head_dim": WIDTH},
        "grape_additive": {"dim": 2 * WIDTH, "heads": count, "head_dim": WIDTH},
    }
    encoding = posenc.create(name, **options.get(name, {}))
    if name == "path":  # which reflects next to nothing at first; gradients of CoPE have jumps
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    x = draw(rows, length, 2 * WIDTH)
    layout = encoding.observe(x, Layout.sequence(length))
    compare(Grid.of(layout, causal=True), encoding, [x], rows, count, count)


def test_keys_too_wide_to_be_kept_packed() -> None:
    """Each tile of them is packed anew: 1,100 keys and values of 1,024 numbers are over 8 MiB."""
    torch.manual_seed(0)
    grid = Grid(Layout.sequence(70, start=1030), Layout.sequence(1100), causal=True)
    compare(grid, Encoding(), [], 1, 1, 1, width=1024)


@pytest.mark.parametrize("most", [9, 64])
def test_keys_with_the_greatest_count_are_attended_to(most: int) -> None:
    """Whole tiles of them, whose gates need not be summed up."""
    torch.manual_seed(9)
    encoding = posenc.create("cope", head_dim=WIDTH, max_count=most)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    compare(Grid.of(Layout.sequence(1100), causal=True), encoding, [], 1, 2, 1)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_rotations_of_several_tiles(pairing: str) -> None:
    torch.manual_seed(6)
    encoding = posenc.create("rope", head_dim=16, pairing=pairing)
    compare(Grid.of(Layout.sequence(600), causal=True), encoding, [], 1, 2, 1, width=16)


@pytest.mark.parametrize("first", [0, 300, 597])
@pytest.mark.parametrize("name", ["fire", "dape"])
def test_few_queries_anywhere_among_keys(name: str, first: int) -> None:
    """The farthest key may be before or after them."""
    torch.manual_seed(2)
    encoding = posenc.create(name, heads=2)
    grid = Grid(Layout.sequence(3, start=first), Layout.sequence(600))
    compare(grid, encoding, [], 2, 2, 1)
