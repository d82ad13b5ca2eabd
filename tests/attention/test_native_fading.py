"""Compiled kernels leave out pairs that a constant table gives no weight, head by head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.backends.native import posing
from posenc.attention.backends.native.posing import record_of
from posenc.attention.problem.lowering import lower
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.encodings.common.buckets import OffsetBias
from posenc.encodings.query_key.rope import Rope
from tests.attention.comparing import built

pytestmark = built

LENGTH = 400


@pytest.fixture(autouse=True)
def _of_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands are looked for in texts of 100 tokens already."""
    monkeypatch.setattr(posing, "LONG", 100)


def draw(heads: int = 6, *, keys: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, LENGTH), (heads // 2, keys), (heads // 2, keys))
    return [0.1 * torch.randn(1, *shape, 8, generator=generator) for shape in shapes]


def bands(grid: Grid, encoding: Encoding, *tensors: Tensor, **options: Any) -> list[list[int]]:
    """The least and the greatest offset of each head; nothing where all heads need all."""
    scale = 8**-0.5
    lowered = lower(encoding, *tensors[:2], grid, scale=scale)
    assert lowered is not None
    problem = Problem(*tensors, grid, encoding, scale, 0.0, lowered, **options)  # type: ignore[arg-type]
    record = record_of(problem, Offsets.regular(grid), lowered)
    found = posing.narrowed(record).geometry.bands
    return [] if found is None else found.tolist()


def test_the_bands_hold_what_matters() -> None:
    grid, encoding, (q, k, v) = (
        Grid.of(Layout.sequence(LENGTH), causal=True),
        create("alibi", heads=6),
        draw(),
    )
    found = bands(grid, encoding, q, k, v)
    lengths = [last - first for first, last in found]
    assert len(lengths) == 6
    assert min(lengths) < 100
    assert max(lengths) == LENGTH - 1
    assert all(last == 0 for _, last in found)
    assert bands(grid, encoding, 1e6 * q, k, v) == []
    assert bands(grid, encoding, q * torch.nan, k, v) == []
    assert bands(grid, encoding, q, k, v, softcap=3.0) == []  # far pairs weigh e^-6 at least


@pytest.mark.parametrize("causal", [True, False])
def test_keys_outside_the_bands_are_not_read(causal: bool) -> None:
    grid, encoding = Grid.of(Layout.sequence(LENGTH), causal=causal), create("alibi", heads=6)
    q, k, v = draw()
    v[:, :, [0, -1]] = torch.nan
    output = attend(q, k, v, grid, encoding, backend="native")
    narrow = min(range(6), key=lambda head: bands(grid, encoding, q, k, v)[head][1])
    assert output[0, narrow, 200:256].isfinite().all()


def test_few_queries_are_left_as_they_are() -> None:
    (q, k, v), encoding = draw(), create("alibi", heads=6)
    for queries, found in ((16, False), (17, True)):
        whole = Layout.sequence(LENGTH)
        grid = Grid(whole.slice(LENGTH - queries, LENGTH), whole, causal=True)
        assert bool(bands(grid, encoding, q[:, :, -queries:], k, v)) == found


def test_only_constant_tables_that_reach_far_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw()
    grid, encoding = Grid.of(Layout.sequence(LENGTH), causal=True), create("alibi", heads=6)
    learned = create("kerple", heads=6)
    assert bands(grid, encoding, *tensors)
    assert bands(grid, learned, *tensors) == []
    later = Grid(Layout.sequence(LENGTH), Layout.sequence(LENGTH, 1))
    assert bands(later, encoding, *tensors) == []  # the first query does not see its own position
    shorter = Grid(Layout.sequence(LENGTH), Layout.sequence(LENGTH - 1), causal=True)
    assert bands(shorter, encoding, *draw(keys=LENGTH - 1)) == []  # nor does the last one here
    monkeypatch.setattr(posing, "LONG", LENGTH + 1)
    assert bands(grid, encoding, *tensors) == []


def far_outweighs_own(groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries whose own keys have the least logit there can be, and the farthest keys the greatest.

    Of the first group of keys; those of others are short.
    """
    generator, unit = torch.Generator().manual_seed(1), torch.ones(8) / 8**0.5
    size = (60 * 8**0.5) ** 0.5  # of queries and keys: products are ±60
    q = (size * unit).expand(1, 6, LENGTH, 8).clone()
    k = (-size * unit).expand(1, groups, LENGTH, 8).clone()
    k[:, :, :40] *= -1
    k[:, 1:] *= 0.01
    return q, k, torch.randn(1, groups, LENGTH, 8, generator=generator)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_far_keys_that_outweigh_near_ones_are_read(groups: int) -> None:
    """By as much as norms of queries and of the keys of their own heads allow, in any row."""
    grid, encoding = Grid.of(Layout.sequence(LENGTH), causal=True), Encoding(score=Steep())
    q, k, v = (torch.cat([0.1 * x, x]) for x in far_outweighs_own(groups))
    expected = attend(*(x.double() for x in (q, k, v)), grid, encoding, backend="reference")
    output = attend(q, k, v, grid, encoding, backend="native")
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_gain_makes_norms_greater() -> None:
    rope = Rope(head_dim=8, gain=4.0, divisors=(1e6,) * 4)  # which rotates by nothing
    grid = Grid.of(Layout.sequence(LENGTH), causal=True)
    q, k, v = far_outweighs_own(6)
    expected, output = (
        attend(q / 4, k / 4, v, grid, Encoding(query_key=rope, score=Steep()), backend=backend)
        for backend in ("reference", "native")
    )
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_queries_that_do_not_see_their_own_key_read_others() -> None:
    """However little these would weigh beside it."""
    ends = (torch.arange(LENGTH) - 100).clamp(min=0)
    shown = torch.stack([torch.zeros_like(ends), ends], dim=-1).unsqueeze(0)
    grid = replace(Grid.of(Layout.sequence(LENGTH), causal=True), intervals=shown)
    expected, output = (
        attend(*draw(), grid, Encoding(score=Steep()), backend=backend)
        for backend in ("reference", "native")
    )
    torch.testing.assert_close(output, expected)


class Steep(OffsetBias):
    """A slope of 0.5 in all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 6

    def bias(self, offset: Tensor) -> Tensor:
        return -0.5 * offset.abs().expand(6, *offset.shape)


class Step(OffsetBias):
    """A constant bias of all but near pairs."""

    def __init__(self, far: float) -> None:
        super().__init__()
        self.heads, self.far = 6, far

    def bias(self, offset: Tensor) -> Tensor:
        return torch.where(offset.abs() > 50, self.far, 0.0).expand(6, *offset.shape)


@pytest.mark.parametrize(("beyond", "least"), [(0.01, 1 - LENGTH), (-0.01, -50)])
def test_pairs_are_left_out_that_weigh_an_eighth_of_the_rounding(beyond: float, least: int) -> None:
    """All keys of a query together: ``eps / (8 K)`` each."""
    limit = math.log(torch.finfo(torch.float32).eps / 8 / LENGTH)
    grid = Grid.of(Layout.sequence(LENGTH), causal=True)
    for dtype in (torch.float32, torch.bfloat16):  # sums are float32 in both
        q, k, v = (torch.zeros(1, 6, LENGTH, 8, dtype=dtype) for _ in range(3))
        found = bands(grid, Encoding(score=Step(limit + beyond)), q, k, v)
        assert found == ([] if least == 1 - LENGTH else [[least, 0]] * 6)
