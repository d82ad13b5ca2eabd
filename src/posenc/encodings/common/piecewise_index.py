"""iRPE's piecewise index: one bucket per near offset, log-spaced buckets for far ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.prepared import constant
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.errors import ArgumentError

Method = Literal["product", "cross", "euclidean", "quantised"]

METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Piecewise:
    """``g(x) = [x]`` for ``|x| ≤ α``, beyond it
    ``sign(x) · min(β, [α + ln(|x|/α) / ln(γ/α) · (β - α)])``, [·] the nearest integer.

    Args:
        alpha: α, up to which each integer has its own bucket.
        beta: β, the largest value; its integer part is the last bucket.
        gamma: γ, the distance from which on g is β.

    Raises:
        ArgumentError: unless 0 < α < β, α < γ and β ≥ 1.
    """

    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value, fits, expected in (
            ("alpha", self.alpha, self.alpha > 0, "more than 0"),
            ("beta", self.beta, self.beta > max(self.alpha, 0.9999), "more than alpha, 1 or more"),
            ("gamma", self.gamma, self.gamma > self.alpha, "more than alpha"),
        ):
            if not (fits and math.isfinite(value)):
                raise ArgumentError(
                    name, expected=expected, got=value, remedy="The paper has 1.9, 3.8 and 15.2."
                )

    @property
    def last(self) -> int:
        """The largest value, ⌊β⌋."""
        return int(self.beta)

    def boundaries(self) -> list[float]:
        """The least |x| whose value is 1, 2, …, ``last``."""
        least = []
        for value in range(1, self.last + 1):
            middle = value - 0.5
            if middle > self.alpha:
                share = (middle - self.alpha) / (self.beta - self.alpha)
                middle = self.alpha * (self.gamma / self.alpha) ** share
            least.append(middle)
        return least

    def of(self, x: Float[Tensor, "*dims"]) -> BucketIndex:
        """g of any real numbers, ``-last … last``."""
        boundaries = constant(self.boundaries(), like=x)
        size = torch.bucketize(x.abs(), boundaries, right=True)
        return torch.where(x < 0, -size, size)


@dataclass(frozen=True)
class Buckets(ABC):
    """A map from offsets Δ' = query - key of an image to buckets ``0 … count - 1``.

    Args:
        piecewise: g.
    """

    piecewise: Piecewise

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of buckets."""

    @abstractmethod
    def of(self, back: Offsets) -> BucketIndex:
        """Bucket of each Δ' = (row, column) of the query less that of the key, in cells."""

    def reverse(self, rows: Float[Tensor, "h N *dims"]) -> Float[Tensor, "h N *dims"]:
        """``rows`` reordered so that -Δ' reads the row of Δ'."""
        return rows.flip(1)


class PairedAxes(Buckets):
    """A bucket for each pair of ``g(Δ'_y)`` and ``g(Δ'_x)``: (2⌊β⌋ + 1)² of them."""

    @property
    def count(self) -> int:
        return (2 * self.piecewise.last + 1) ** 2

    def of(self, back: Offsets) -> BucketIndex:
        last = self.piecewise.last
        index = self.piecewise.of(back[..., :2]) + last
        return index[..., 0] * (2 * last + 1) + index[..., 1]


@dataclass(frozen=True)
class Along(Buckets):
    """A bucket for each ``g(Δ')`` on one axis: 2⌊β⌋ + 1 of them."""

    axis: int

    @property
    def count(self) -> int:
        return 2 * self.piecewise.last + 1

    def of(self, back: Offsets) -> BucketIndex:
        return self.piecewise.of(back[..., self.axis]) + self.piecewise.last


class Radial(Buckets):
    """A bucket for each ``g([‖Δ'‖])``, [·] the nearest integer: ⌊β⌋ + 1 of them."""

    @property
    def count(self) -> int:
        return self.piecewise.last + 1

    def of(self, back: Offsets) -> BucketIndex:
        return self.piecewise.of(self.distance(back))

    def distance(self, back: Offsets) -> Float[Tensor, "*dims"]:
        """The integer argument of g."""
        return back.square().sum(-1).sqrt().round()

    def reverse(self, rows: Float[Tensor, "h N *dims"]) -> Float[Tensor, "h N *dims"]:
        return rows


class Ranked(Radial):
    """Buckets by the rank of ‖Δ'‖ among all distances between cells: 0, 1, √2, 2, √5, …"""

    @cached_property
    def squares(self) -> list[int]:
        """Squares of the least distances; all beyond the last boundary share a bucket."""
        return _sums_of_two_squares(math.ceil(max(self.piecewise.boundaries())) + 1)

    def distance(self, back: Offsets) -> Float[Tensor, "*dims"]:
        square = back.round().square().sum(-1)
        squares = constant(self.squares, like=square)
        return torch.bucketize(square, squares, right=True).to(square.dtype) - 1


def _sums_of_two_squares(count: int) -> list[int]:
    """The ``count`` least numbers that are a sum of two squares: 0, 1, 2, 4, 5, 8, …"""
    sums = {a * a + b * b for a in range(count) for b in range(count)}
    return sorted(sums)[:count]


def buckets_of(method: Method, piecewise: Piecewise) -> tuple[Buckets, ...]:
    """The maps of a method, one a table: two for cross, one for the others.

    Raises:
        UnknownNameError: for another method.
    """
    if method == "cross":
        return Along(piecewise, 0), Along(piecewise, 1)
    kinds: dict[str, Callable[[Piecewise], Buckets]] = {
        "product": PairedAxes,
        "euclidean": Radial,
        "quantised": Ranked,
    }
    return (kinds[method](piecewise),)
