"""Few queries after many keys: heads that share keys, and windows over a cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create, explain
from posenc.attention.backends import sdpa
from posenc.attention.backends.common import fused
from posenc.encoding import BucketedTerms, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.extension import extend
from tests.attention.comparing import compare
from tests.support.exhaustive import in_turn

KEYS = 90


def operands(queries: int, *, heads: int = 6, groups: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads, queries, 16), (2, groups, KEYS, 16), (2, groups, KEYS, 16))
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in sizes
    )


def last(queries: int, *, window: int | tuple[int, int] | None = None) -> Grid:
    return Grid(Layout.sequence(queries, KEYS - queries), Layout.sequence(KEYS), True, window)


WINDOWS = {
    "all keys": last,
    "window": partial(last, window=30),
    "behind": partial(last, window=(-40, -3)),
    "ahead": lambda queries: replace(last(queries, window=(3, 9)), causal=False),
}


@pytest.mark.parametrize(
    ("backend", "where", "padded", "queries"),
    in_turn(4, ["auto", "sdpa", "native", "blockwise"], list(WINDOWS)[:3], [False, True], [1, 5]),
)
def test_grouped_heads(backend: str, where: str, padded: bool, queries: int) -> None:
    grid = WINDOWS[where](queries)
    if padded:
        valid = torch.arange(KEYS).expand(2, -1) >= torch.tensor([[0], [70]])
        grid = replace(grid, key=replace(grid.key, valid=valid))
    compare(operands(queries), grid, Encoding(), backend, tolerance=1e-7)


def called(
    shapes: list[tuple[int, ...]], real: Any, q: Tensor, *others: Any, **options: Any
) -> Any:
    """Call ``real`` and remember the shape of its queries."""
    shapes.append(tuple(q.shape))
    return real(q, *others, **options)


def test_heads_that_share_keys_are_queries_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    real = fused.scaled_dot_product_attention
    monkeypatch.setattr(fused, "scaled_dot_product_attention", partial(called, shapes, real))
    alibi = create("alibi", heads=6)
    for queries in (1, 2, 21, 22):
        attend(*operands(queries), last(queries), Encoding(), backend="sdpa")
        attend(*operands(queries), last(queries), alibi, backend="sdpa")
    attend(*operands(KEYS), last(KEYS), Encoding(), backend="sdpa")
    with torch.no_grad():
        q, k, v = (x.float() for x in operands(2))
        monkeypatch.setattr(sdpa, "flash_forward", partial(called, shapes, sdpa.flash_forward))
        attend(q, k, v, last(2), alibi, backend="sdpa", return_lse=True)
    assert shapes.pop() == (2, 2, 6, 16)
    folded = [(2, 2, 3 * queries, 16) for queries in (1, 1, 2, 2, 21, 21)]
    assert shapes == [*folded, (2, 6, 22, 16), (2, 6, 22, 16), (2, 6, KEYS, 16)]


@pytest.mark.parametrize(
    ("name", "queries", "where", "grouped"),
    in_turn(6, ["nope", "rope", "alibi", "t5"], [1, 3, 16, 17], list(WINDOWS), [False, True]),
)
def test_calls_of_the_same_few_queries(name: str, queries: int, where: str, grouped: bool) -> None:
    """Planned, prepared, and by what was prepared; ahead some queries see no key."""
    grid = WINDOWS[where](queries)
    encoding = create(name, heads=6, head_dim=16, causal=grid.causal)
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            q, k, v = operands(queries, groups=2 if grouped else 6)
            q, k, v = (x.float() + seed for x in (q, k, v))
            expected = attend(q, k, v, grid, encoding, backend="reference", return_lse=True)
            found = attend(q, k, v, grid, encoding, return_lse=True)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_short_causal_text_of_grouped_heads() -> None:
    """The kernel's own causal mask goes by the index of a query among those of its head."""
    layout = Layout.sequence(5)
    grid, nothing = Grid(layout, layout, causal=True), Encoding()
    with torch.no_grad():
        for _ in range(3):
            q, k, v = (x.float()[:, :, :5] for x in operands(5))
            expected = attend(q, k, v, grid, nothing, backend="reference", return_lse=True)
            found = attend(q, k, v, grid, nothing, return_lse=True)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Watched(ScoreTerm):
    """Remembers the heads of the keys that it is lowered with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return torch.zeros_like(grid.offset[..., 0]).unsqueeze(1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        self.seen.append(k.shape[1])
        return (BucketedTerms(lambda offset: offset[..., 0].long() * 0, table=q.new_zeros(6, 1)),)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "native", "blockwise"])
def test_keys_are_not_copied_for_parts_that_do_not_read_them(backend: str) -> None:
    score = Watched()
    attend(*operands(3), last(3), Encoding(score=score), backend=backend)
    assert set(score.seen) == {2}


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [9, (-20, -4), (-5, 1)])
def test_a_window_reads_its_slice_of_the_keys(window: int | tuple[int, int], queries: int) -> None:
    """Whatever hidden keys hold, no number of theirs is read."""
    q, k, v = operands(queries)
    grid, alibi = last(queries, window=window), create("alibi", heads=6)
    expected = attend(q, k, v, grid, alibi, backend="reference")
    hidden = ~grid.visible[0, 0].any(0)
    assert int(hidden.sum()) > KEYS // 2
    holes = [x.detach().masked_fill(hidden[:, None], float("nan")) for x in (k, v)]
    got = attend(q, *holes, grid, alibi)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert "native" in str(explain(q, k, v, grid, alibi, backend="native"))


def test_parts_that_read_all_keys_get_them() -> None:
    """Log-n scaling reads the last position of all keys, hidden ones too."""
    rope = Encoding.of(create("rope", head_dim=16).query_key)
    scaled = extend(rope, "log_n", length=16)
    q, k, v = operands(KEYS)
    whole = Layout.sequence(KEYS)
    expected = attend(q, k, v, Grid(whole, whole, window=2), scaled, backend="reference")
    few = Grid(whole.slice(40, 41), whole, window=2)
    torch.testing.assert_close(attend(q[:, :, 40:41], k, v, few, scaled), expected[:, :, 40:41])
