"""Image relative positions: iRPE."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Interval, Width, checked
from posenc.encoding import BucketedTerms, Encoding, Entry, ScoreTerm, TokenTableProduct, ValueTerm
from posenc.encoding.prepared import constant
from posenc.encoding.tensors import (
    BucketIndex,
    Keys,
    Offsets,
    Queries,
    Scores,
    StructuredTerms,
    repeat_heads,
)
from posenc.encodings.common.buckets import gather_rows, sum_by_bucket
from posenc.encodings.common.special_tokens import has_special, special_pairs
from posenc.errors import ArgumentError
from posenc.grid import Grid

Mode = Literal["contextual", "bias"]

Method = Literal["product", "cross", "euclidean", "quantised"]

Cells = Annotated[float, Interval(1e-6, 1024)]
"""A distance; tables have a row for each up to β, squared by ``method="product"``."""


@dataclass(frozen=True)
class Piecewise:
    """``g(x) = [x]`` for ``|x| ≤ α``, beyond it
    ``sign(x) · min(β, [α + ln(|x|/α) / ln(γ/α) · (β - α)])``, [·] the nearest integer.

    Args:
        alpha: α, up to which each integer has its own bucket.
        beta: β, the largest value; its integer part is the last bucket.
        gamma: γ, the distance from which on g is β.

    Raises:
        ArgumentError: unless α < β, α < γ and β ≥ 1.
    """

    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value, least in (
            ("beta", self.beta, max(self.alpha, 0.9999)),
            ("gamma", self.gamma, self.alpha),
        ):
            if value <= least:
                raise ArgumentError(
                    name,
                    expected="more than alpha, beta 1 or more",
                    got=value,
                    remedy="The paper has 1.9, 3.8 and 15.2.",
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
        size = torch.bucketize(x.abs().contiguous(), boundaries, right=True)
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
    """The maps of a method, one a table: two for cross, one for the others."""
    if method == "cross":
        return Along(piecewise, 0), Along(piecewise, 1)
    if method == "product":
        return (PairedAxes(piecewise),)
    return (Radial(piecewise) if method == "euclidean" else Ranked(piecewise),)


@checked
def irpe(
    *,
    heads: Count,
    head_dim: Width,
    method: Method = "product",
    mode: Mode = "contextual",
    on: str = "k",
    shared_heads: bool = True,
    alpha: Cells = 1.9,
    beta: Cells = 3.8,
    gamma: Cells = 15.2,
) -> Encoding:
    """iRPE: a learned vector (or number) for each bucket of 2-D offsets, on queries, keys, values.

    Contextual: ``s_ij += scale · (q_i · r^K[n(Δ')] + k_j · r^Q[n(-Δ')])`` and
    ``o_i += Σ_j p_ij r^V[n(Δ')]``; bias: ``s_ij += r^K[n(Δ')] + r^Q[n(-Δ')]``.

    Δ' = (row, column) of query i less that of key j, in cells, any real; r ``[N, D]``, or ``[N]``
    for bias, zero at first, for each head unless shared. With g the piecewise index (equation 18),
    ``[x]`` up to α and then logarithmic up to β, reached at γ, the buckets are, by ``method``:
    ``"product"`` pairs ``(g(Δ'_y), g(Δ'_x))``; ``"cross"`` g(Δ'_y) and g(Δ'_x), a table each,
    summed; ``"euclidean"`` ``g([‖Δ'‖])``; ``"quantised"`` g of the rank of ‖Δ'‖ among the distances
    0, 1, √2, 2, √5, … Pairs with a special token (a class token) have a bucket of their own, the
    last. Differs from the authors' code in ranking distances as the paper does, where that takes
    their squares, and in no rows for negative distances; biases are not scaled, as in that code.

    Args:
        heads: H.
        head_dim: width D of a head.
        method: how offsets fall into buckets.
        mode: ``"contextual"``, or ``"bias"`` for numbers independent of query and key.
        on: which of ``"q"``, ``"k"`` and ``"v"`` it acts on, such as ``"qkv"``.
        shared_heads: one table serves all heads.
        alpha, beta, gamma: α, β and γ in cells.

    Raises:
        ArgumentError: when an argument is out of its domain; values have no bias mode.
        UnknownNameError: for another ``method`` or ``mode``.

    Reference: Wu et al. 2021, "Rethinking and Improving Relative Position Encoding for Vision
    Transformer", https://arxiv.org/abs/2107.14222.

    >>> import posenc
    >>> encoding = posenc.create("irpe", heads=4, head_dim=32, on="qkv")
    >>> encoding.score.keys[0].shape, encoding.value.values[0].shape
    (torch.Size([1, 50, 32]), torch.Size([1, 50, 32]))
    """
    if not on or set(on) - set("qkv") or len(set(on)) < len(on):
        raise ArgumentError(
            "on", expected="some of the letters q, k, v", got=repr(on), remedy="The paper has 'k'."
        )
    if mode == "bias" and "v" in on:
        raise ArgumentError(
            "on",
            expected="'q', 'k' or 'qk' in bias mode",
            got=repr(on),
            remedy='Values take vectors: use mode="contextual".',
        )
    buckets = buckets_of(method, Piecewise(alpha, beta, gamma))
    width = None if mode == "bias" else head_dim
    tables = 1 if shared_heads else heads
    score = IrpeScore(buckets, on, tables, width) if set(on) & set("qk") else None
    value_part = IrpeValue(buckets, tables, head_dim) if "v" in on else None
    return Encoding(score=score, value=value_part)


class IrpeScore(ScoreTerm):
    """Score part of ``irpe``: its query and key terms.

    Args:
        buckets: one map a table.
        on: sites; those among ``"q"`` and ``"k"`` are used.
        tables: heads with a table of their own, or 1.
        width: D; None for bias mode.
    """

    axes = (2,)
    rows_by_position = True

    def __init__(
        self, buckets: tuple[Buckets, ...], on: str, tables: int, width: int | None
    ) -> None:
        super().__init__()
        self.buckets, self.contextual = buckets, width is not None
        self.heads, self.head_dim = tables if tables > 1 else None, width
        self.keys = _tables(buckets, tables, width) if "k" in on else None
        self.queries = _tables(buckets, tables, width) if "q" in on else None

    def reset_parameters(self) -> None:
        """Start at zero, as the authors' code does."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        total = q.new_zeros(())
        offset = grid.offset
        keys = None if self.keys is None else self.keys()
        queries = None if self.queries is None else self.queries()
        for place, buckets in enumerate(self.buckets):
            if keys is not None:
                index = _index(buckets, -offset, grid)
                total = total + self._read(q, keys[place], index, scale)
            if queries is not None:
                index = _index(buckets, offset, grid).mT
                total = total + self._read(k, queries[place], index, scale).mT
        return total.expand(-1, q.shape[1], -1, -1)

    def _read(
        self, tokens: Tensor, rows: Tensor, index: Int[Tensor, "b L M"], scale: float
    ) -> Float[Tensor, "b h L M"]:
        if self.contextual:
            return scale * gather_rows(tokens, rows, index)
        return rows[:, index].transpose(0, 1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        if has_special(grid):
            return None
        k = repeat_heads(k, q.shape[1])
        return tuple(self._group(n, buckets, q, k, scale) for n, buckets in enumerate(self.buckets))

    def _group(
        self, place: int, buckets: Buckets, q: Tensor, k: Tensor, scale: float
    ) -> BucketedTerms:
        keys = queries = None
        if self.keys is not None:
            keys = self.keys()[place][:, : buckets.count]
        if self.queries is not None:
            queries = buckets.reverse(self.queries()[place][:, : buckets.count])

        def bucket(offset: Offsets) -> BucketIndex:
            return buckets.of(-offset)

        if self.contextual:
            left = None if keys is None else TokenTableProduct(q, scale * keys)
            right = None if queries is None else TokenTableProduct(k, scale * queries)
            return BucketedTerms(bucket, left=left, right=right)
        table = sum(rows for rows in (keys, queries) if rows is not None)
        return BucketedTerms(bucket, table=torch.as_tensor(table).expand(q.shape[1], -1))


class IrpeValue(ValueTerm):
    """Value part of ``irpe``.

    Args:
        buckets: one map a table.
        tables: heads with a table of their own, or 1.
        width: D.
    """

    axes = (2,)

    def __init__(self, buckets: tuple[Buckets, ...], tables: int, width: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.heads, self.head_dim = tables if tables > 1 else None, width
        self.values = _tables(buckets, tables, width)

    def reset_parameters(self) -> None:
        """Start at zero, as the authors' code does."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        back = -grid.offset
        sums = [
            sum_by_bucket(weights, rows, _index(buckets, back, grid))
            for rows, buckets in zip(self.values(), self.buckets, strict=True)
        ]
        return torch.stack(sums).sum(0)

    def lower(self, grid: Grid) -> BucketedTerms | None:
        if has_special(grid):
            return None
        # Several tables are one, with a row for each combination of their buckets.
        first, *others = self.values()
        rows = first[:, : self.buckets[0].count]
        for more, buckets in zip(others, self.buckets[1:], strict=True):
            rows = (rows.unsqueeze(2) + more[:, : buckets.count].unsqueeze(1)).flatten(1, 2)

        def bucket(offset: Offsets) -> BucketIndex:
            index = self.buckets[0].of(-offset)
            for buckets in self.buckets[1:]:
                index = index * buckets.count + buckets.of(-offset)
            return index

        return BucketedTerms(bucket, value=rows)


def _tables(buckets: tuple[Buckets, ...], tables: int, width: int | None) -> Tables:
    """A table for each map, ``[tables, N + 1]`` or ``[tables, N + 1, D]``, zero.

    The last row is for pairs with a special token.
    """
    shape = () if width is None else (width,)
    return Tables(torch.zeros(tables, bucket_map.count + 1, *shape) for bucket_map in buckets)


class Tables(nn.ParameterList):
    """Tables of a part, read by calling it."""

    __call__ = nn.Module.__call__  # which a ParameterList refuses

    def forward(self) -> list[Tensor]:
        """The tables."""
        return list(self)


def _index(buckets: Buckets, back: Float[Tensor, "b Q K A"], grid: Grid) -> Int[Tensor, "b Q K"]:
    """Buckets of all pairs; the last row for those with a special token."""
    index, special = buckets.of(back), special_pairs(grid)
    return index if special is None else index.masked_fill(special, buckets.count)


ENTRY = Entry(
    factory=irpe,
    summary="Adds learned vectors for buckets of 2-D offsets to queries, keys and values.",
    sites=("score",),
    relative=True,
    axes=(2,),
    trainable=True,
    extrapolates="Holds moderately: offsets from about 15 cells on share a bucket.",
    cost="Q·K·H beside Q·N·D·H a site",
)
