"""iRPE against loops over the paper's equations, and indices by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.irpe import Method, Piecewise, buckets_of, irpe
from tests.support.exhaustive import in_turn

PAPER = (1.9, 3.8, 15.2)
METHODS: tuple[Method, ...] = get_args(Method)
LAST = 3

GRIDS = {
    "image": Grid.of(Layout.image(2, 5)),
    "two images": Grid(Layout.image(2, 2), Layout.image(3, 1)),
    "one cell": Grid.of(Layout.image(1, 1)),
    "far beyond": Grid(Layout.at(torch.tensor([[[9e3, -9e3]]])), Layout.image(2, 3)),
    "fractions, own positions a row": Grid.of(
        Layout.at(torch.tensor([[[0.0, 0.4], [1.7, 3.0]], [[90.0, 7.3], [80.0, 4.0]]]))
    ),
    "a class token": Grid.of(Layout.image(2, 3, prefix=1)),
    "documents": Grid.of(
        replace(Layout.image(2, 3), document=torch.tensor([[0, 0, 1, 0, 1, 1]])), causal=True
    ),
}


def nearest(x: float) -> int:
    return math.floor(x + 0.5)


def piecewise(x: float) -> int:
    alpha, beta, gamma = PAPER
    size = abs(x)
    if size <= alpha:
        value = nearest(size)
    else:
        value = nearest(alpha + math.log(size / alpha) / math.log(gamma / alpha) * (beta - alpha))
    return int(math.copysign(min(value, int(beta)), x))


@functools.cache
def distances() -> list[float]:
    """0, 1, √2, 2, √5, …: all distances between cells of a large image, in order."""
    return sorted({math.hypot(a, b) for a in range(40) for b in range(40)})[:200]


def index_by_loops(method: Method, back: tuple[float, float]) -> list[int]:
    """Bucket in each table of the offset query - key."""
    down, across = back
    if method == "product":
        return [(piecewise(down) + LAST) * (2 * LAST + 1) + piecewise(across) + LAST]
    if method == "cross":
        return [piecewise(down) + LAST, piecewise(across) + LAST]
    if method == "euclidean":
        return [piecewise(nearest(math.hypot(down, across)))]
    length = math.hypot(round(down), round(across))
    return [piecewise(sum(d <= length + 1e-9 for d in distances()) - 1)]


def attention_by_loops(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, encoding: Encoding, method: Method, mode: str
) -> Tensor:
    output = torch.zeros_like(q)
    scale = q.shape[-1] ** -0.5
    score, value, visible = encoding.score, encoding.value, grid.visible
    for b in range(q.shape[0]):
        at_row = min(b, grid.query.positions.shape[0] - 1)
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                logits, values = [], []
                for j in range(k.shape[2]):
                    if not visible[min(b, len(visible) - 1), 0, i, j]:
                        continue
                    at = grid.query.positions[at_row, i].tolist()
                    to = grid.key.positions[at_row, j].tolist()
                    back = (at[0] - to[0], at[1] - to[1])
                    ahead = (to[0] - at[0], to[1] - at[1])
                    found, turned = (index_by_loops(method, each) for each in (back, ahead))
                    if grid.query.special is not None and 0 in (i, j):
                        found = turned = [-1] * len(found)
                    logit = scale * (q[b, h, i] @ k[b, h, j])
                    for tables, indices, token in (
                        (getattr(score, "keys", None), found, q[b, h, i]),
                        (getattr(score, "queries", None), turned, k[b, h, j]),
                    ):
                        if tables is None:
                            continue
                        for table, n in zip(tables, indices, strict=True):
                            row = table[min(h, table.shape[0] - 1), n]
                            logit = logit + (row if mode == "bias" else scale * (token @ row))
                    mixed = v[b, h, j]
                    if value is not None:
                        for table, n in zip(value.values, found, strict=True):
                            mixed = mixed + table[min(h, table.shape[0] - 1), n]
                    logits.append(logit)
                    values.append(mixed)
                output[b, h, i] = torch.stack(logits).softmax(0) @ torch.stack(values)
    return output


def make(method: Method = "product", **options: object) -> Encoding:
    torch.manual_seed(2)
    sizes = {"heads": 3, "head_dim": 4} | options
    encoding = irpe(method=method, **sizes).double()  # type: ignore[arg-type]
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


def draw(grid: Grid) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (grid.query.length, grid.key.length, grid.key.length)
    return [torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for n in sizes]


@pytest.mark.parametrize(
    ("grid", "method", "mode", "on", "shared"),
    in_turn(
        4,
        GRIDS,
        METHODS,
        [("contextual", "k", True), ("contextual", "qkv", False), ("bias", "qk", False)],
    ),
)
def test_equals_loops(grid: Grid, method: Method, mode: str, on: str, shared: bool) -> None:
    encoding = make(method, mode=mode, on=on, shared_heads=shared)
    q, k, v = draw(grid)
    found = attend(q, k, v, grid, encoding)
    with torch.no_grad():
        expected = attention_by_loops(q, k, v, grid, encoding, method, mode)
    torch.testing.assert_close(found.detach(), expected)


def test_heads_may_share_keys() -> None:
    encoding, grid = make(on="qk", heads=4, head_dim=8), Grid.of(Layout.image(3, 4))
    q, k, v = (torch.randn(2, heads, 12, 8, dtype=torch.float64) for heads in (4, 2, 2))
    each = (q, *(x.repeat_interleave(2, dim=1) for x in (k, v)))
    expected = attend(*each, grid, encoding, backend="reference")
    torch.testing.assert_close(attend(q, k, v, grid, encoding), expected)


def test_pairs_with_a_class_token_have_no_structured_form() -> None:
    encoding = make(on="kv")
    q, k, _ = draw(GRIDS["a class token"])
    assert encoding.score.lower(q, k, GRIDS["a class token"], scale=1.0) is None
    assert encoding.value.lower(GRIDS["a class token"]) is None


def test_the_piecewise_index_by_hand() -> None:
    # 1.9 + ln(x/1.9)/ln 8 · 1.9: 2 → 1.947, 3 → 2.317, 4 → 2.580, 15 → 3.788, 16 → 3.847 → β.
    piece = Piecewise(*PAPER)
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 15.0, 16.0, 1e6])
    assert piece.of(x).tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    assert piece.of(-x).tolist() == [0, -1, -2, -2, -3, -3, -3, -3]


@pytest.mark.parametrize("sizes", [PAPER, (2.5, 5.0, 20.0), (4.0, 9.0, 32.0), (0.3, 1.0, 2.0)])
def test_the_piecewise_index_equals_the_equation(sizes: tuple[float, float, float]) -> None:
    alpha, beta, gamma = sizes
    x = torch.linspace(-60, 60, 24_001, dtype=torch.float64)
    away = x.abs()
    far = alpha + (away / alpha).clamp(min=1e-9).log() / math.log(gamma / alpha) * (beta - alpha)
    expected = (
        torch.where(away <= alpha, away, far).add(0.5).floor().clamp(max=int(beta)) * x.sign()
    )
    found = Piecewise(*sizes).of(x)
    # Rounding may put a number that lies exactly on a boundary on either side.
    assert (found != expected).double().mean().item() < 1e-3


def test_ranks_by_hand() -> None:
    # Squares of distances: 0 1 2 4 5 8 9 10; so (1, 1) has rank 2 and (2, 0) rank 3.
    (ranked,) = buckets_of("quantised", Piecewise(8.0, 16.0, 64.0))
    back = torch.tensor(
        [[0.0, 0.0], [0.0, 1.0], [1.0, -1.0], [-2.0, 0.0], [2.0, 1.0], [2.0, 2.0], [3.0, 0.0]]
    )
    assert ranked.of(back).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_close_neighbours_share_a_euclidean_bucket_and_not_a_quantised_one() -> None:
    back = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    piece = Piecewise(*PAPER)
    assert buckets_of("euclidean", piece)[0].of(back).tolist() == [1, 1]
    assert buckets_of("quantised", piece)[0].of(back).tolist() == [1, 2]


@pytest.mark.parametrize("method", METHODS)
def test_buckets_fill_their_range_and_mirror(method: Method) -> None:
    side = torch.arange(-40.0, 41.0)
    offsets = torch.cartesian_prod(side, side)
    for buckets in buckets_of(method, Piecewise(*PAPER)):
        index = buckets.of(offsets)
        assert sorted(set(index.tolist())) == list(range(buckets.count))
        rows = torch.arange(buckets.count).reshape(1, -1)
        assert buckets.reverse(rows)[0, index].equal(buckets.of(-offsets))
