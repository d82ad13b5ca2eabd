"""Calls are repeated only where nothing of a part changes between them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.native.build import missing
from posenc.encoding import BucketedTerms, DistanceFunction, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels"),
    pytest.mark.usefixtures("entered"),
]

GRID = Grid.of(Layout.sequence(64), causal=True)

OWN = "posenc.own"
"""The module of parts that pass for posenc's own; calls with others are planned each time."""


def agree(encoding: Encoding, seed: int, grid: Grid = GRID) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 4, 64, 8, generator=generator)
    output = attend(q, k, v, grid, encoding, return_lse=True)
    expected = attend(q, k, v, grid, encoding, return_lse=True, backend="reference")
    torch.testing.assert_close(output, expected, atol=3e-6, rtol=1e-5)


class Sloped(ScoreTerm):
    """The offset times a slope, by a table."""

    def slope(self, q: Queries, grid: Grid) -> Tensor | float:
        raise NotImplementedError

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        offset = grid.offset[..., 0].unsqueeze(1)
        return (self.slope(q, grid) * offset).expand(-1, q.shape[1], -1, -1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        table = self.slope(q, grid) * torch.arange(-99.0, 100.0).expand(q.shape[1], -1)
        return (BucketedTerms(lambda offset: offset[..., 0].long() + 99, table=table),)


class Moody(Sloped):
    """Its slope depends on the queries."""

    __module__ = OWN

    def slope(self, q: Queries, grid: Grid) -> Tensor:
        return q.mean()


class MoodyCurve(ScoreTerm):
    """The distance times a slope and each query's factor, and a height, by the mean of all queries.

    The LSE has the height, no weight does.
    """

    __module__ = OWN

    def __init__(self, changing: str) -> None:
        super().__init__()
        self.changing = changing

    def _number(self, q: Queries, name: str, otherwise: float) -> Tensor:
        return q.mean() if name == self.changing else q.new_tensor(otherwise)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        slope, factor = self._number(q, "slope", -1.0), self._number(q, "factor", 1.0).abs()
        distance = grid.offset[..., 0].abs().unsqueeze(1)
        return slope * factor * distance + self._number(q, "height", 0.0)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> DistanceFunction:
        slope, height = (
            self._number(q, name, otherwise).expand(q.shape[1], 1)
            for name, otherwise in (("slope", -1.0), ("height", 0.0))
        )
        factor = self._number(q, "factor", 1.0).abs().expand(1, q.shape[2])
        return DistanceFunction(torch.abs, factor, q.new_empty(0), slope, height)


class MoodySignal(Sloped):
    """Its slope depends on the layout's signals."""

    __module__ = OWN

    def slope(self, q: Queries, grid: Grid) -> Tensor:
        assert grid.key.signal is not None
        return grid.key.signal.mean()


@pytest.mark.parametrize(
    "score", [Moody(), *(MoodyCurve(name) for name in ("slope", "factor", "height"))]
)
def test_terms_of_the_queries_are_made_for_each_call(score: ScoreTerm) -> None:
    encoding = Encoding(score=score)
    with torch.no_grad():
        for seed in range(4):
            agree(encoding, seed)


def test_terms_of_signals_are_made_for_each_call() -> None:
    encoding = Encoding(score=MoodySignal())
    with torch.no_grad():
        for seed in range(4):
            layout = GRID.query.with_signal(torch.full((1, 64, 1), 0.1 * seed))
            agree(encoding, seed, Grid.of(layout, causal=True))


@dataclass
class Settings:
    slope: float = 0.0


class Adjustable(Sloped):
    """Its slope is in an object that can be changed."""

    __module__ = OWN

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def slope(self, q: Queries, grid: Grid) -> float:
        return self.settings.slope


def test_settings_that_can_be_changed_in_place_are_read_by_each_call() -> None:
    score = Adjustable()
    encoding = Encoding(score=score)
    with torch.no_grad():
        for seed in range(5):
            score.settings.slope -= 0.1
            agree(encoding, seed)
