"""Parts in a random structured form, such as no method of the registry has all of.

Rows, factors and rotations of each head or of all, other tokens than queries and keys, buckets
that are left and met again, several maps from offsets to buckets.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from posenc.encoding import (
    BucketedTerms,
    Encoding,
    Entry,
    LowRank,
    QueryKeyTransform,
    Rotation,
    ScoreTerm,
    TokenTableProduct,
    ValueTerm,
    repeat_heads,
)
from posenc.encodings.common.buckets import gather_rows, sum_by_bucket
from posenc.extension import extend
from posenc.grid import Grid
from posenc.layout import Layout

Map = Callable[[Tensor], Tensor]

COUNTS = (1, 2, 5, 5, 33, 33, 700, 1500)
"""Buckets."""


def _parameter(*size: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(size))


def _map(dice: random.Random, count: int) -> Map:
    """A map from offsets to ``count`` buckets."""
    step, first = dice.choice([1, 1, 3]), dice.choice([0, count // 2, count - 1])
    again = dice.random() < 0.4

    def bucket(offset: Tensor) -> Tensor:
        number = offset[..., 0].round().long().div(step, rounding_mode="floor") + first
        return number.remainder(count) if again else number.clamp(0, count - 1)

    return bucket


class RandomRotation(QueryKeyTransform):
    """Angles in proportion to the position, of all heads or of each, other ones of the keys."""

    def __init__(self, dice: random.Random, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        pairs = dice.randint(1, head_dim // 2)
        self.pairing = dice.choice(["half", "adjacent"])
        for side in ("query", "key"):
            self.register_buffer(side, torch.rand(dice.choice([1, heads]), 1, pairs))

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return self.lower(q, k, grid).apply(q, k)

    def lower(self, q: Tensor, k: Tensor, grid: Grid) -> Rotation:
        query = self._factors(q, grid.query, self.query)
        key = self._factors(k, grid.key, self.key[: k.shape[1]])
        return Rotation(query, key, self.pairing)

    def _factors(self, x: Tensor, layout: Layout, rates: Tensor) -> tuple[Tensor, Tensor]:
        angles = layout.positions.double().unsqueeze(1) * rates.double()
        wide = torch.promote_types(x.dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)


class Group(nn.Module):
    """Terms of one map, some of them missing."""

    def __init__(self, dice: random.Random, heads: int, head_dim: int) -> None:
        super().__init__()
        self.count = dice.choice(COUNTS)
        self.bucket = _map(dice, self.count)
        self.table = _parameter(heads, self.count) if dice.random() < 0.5 else None
        self.column = _parameter(heads, head_dim, 1) if dice.random() < 0.3 else None
        self.row = _parameter(heads, head_dim, 1) if dice.random() < 0.2 else None
        for side in ("left", "right"):
            rows = others = None
            if dice.random() < 0.5:
                width = dice.choice([head_dim, head_dim, 3])
                rows = _parameter(dice.choice([1, heads]), self.count, width)
                if width != head_dim or dice.random() < 0.3:
                    others = _parameter(heads, head_dim, width)
            self.register_parameter(f"{side}_rows", rows)
            self.register_parameter(f"{side}_tokens", others)

    def terms(self, q: Tensor, k: Tensor, scale: float) -> BucketedTerms:
        def product(
            x: Tensor, rows: Tensor | None, others: Tensor | None
        ) -> TokenTableProduct | None:
            if rows is None:
                return None
            return TokenTableProduct(x if others is None else x @ others.to(x), scale * rows)

        def number(x: Tensor, vector: Tensor | None) -> Tensor | None:
            return None if vector is None else (x @ vector.to(x)).squeeze(-1) * scale

        return BucketedTerms(
            self.bucket,
            table=self.table,
            left=product(q, self.left_rows, self.left_tokens),
            right=product(k, self.right_rows, self.right_tokens),
            row=number(q, self.row),
            column=number(k, self.column),
        )


class Factors(nn.Module):
    """A low-rank term, each side of which is of the tokens or of their places."""

    def __init__(self, dice: random.Random, heads: int, head_dim: int) -> None:
        super().__init__()
        rank = dice.choice([1, 3, 16])
        self.by_place = [dice.random() < 0.5 for _ in range(2)]
        self.query, self.key = (
            _parameter(heads, 1 if by_place else head_dim, rank) for by_place in self.by_place
        )

    def terms(self, q: Tensor, k: Tensor, scale: float) -> LowRank:
        query, key = (
            torch.linspace(-1, 1, x.shape[2]).to(x).view(1, 1, -1, 1) if by_place else x
            for x, by_place in zip((q, k), self.by_place, strict=True)
        )
        return LowRank(scale * (query @ self.query.to(q)), key @ self.key.to(k))


class RandomTerms(ScoreTerm):
    """Groups of terms and factors."""

    def __init__(self, dice: random.Random, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        groups = [Group(dice, heads, head_dim) for _ in range(dice.choice([1, 1, 2]))]
        factors = [Factors(dice, heads, head_dim) for _ in range(dice.choice([0, 0, 1]))]
        self.summands = nn.ModuleList([*groups, *factors])

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        return sum(
            (_dense(term, grid) for term in self.lower(q, k, grid, scale=scale)), 0.0 * q.sum()
        )

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[BucketedTerms | LowRank, ...]:
        k = repeat_heads(k, q.shape[1])
        return tuple(summand.terms(q, k, scale) for summand in self.summands)


def _dense(term: BucketedTerms | LowRank, grid: Grid) -> Tensor:
    """The summand of every pair."""
    if isinstance(term, LowRank):
        return term.query @ term.key.mT
    bucket = term.bucket(grid.offset)
    parts = []
    if term.table is not None:
        parts.append(term.table[:, bucket].transpose(0, 1))
    if term.left is not None:
        parts.append(gather_rows(term.left.tokens, term.left.rows, bucket))
    if term.right is not None:
        parts.append(gather_rows(term.right.tokens, term.right.rows, bucket.mT).mT)
    if term.row is not None:
        parts.append(term.row.unsqueeze(-1))
    if term.column is not None:
        parts.append(term.column.unsqueeze(-2))
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())


class RandomValues(ValueTerm):
    """A vector for each bucket, of all heads or of each."""

    def __init__(self, dice: random.Random, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        count = dice.choice(COUNTS)
        self.bucket = _map(dice, count)
        self.rows = _parameter(dice.choice([1, heads]), count, head_dim)

    def forward(self, weights: Tensor, grid: Grid) -> Tensor:
        return sum_by_bucket(weights, self.rows, self.bucket(grid.offset))

    def lower(self, grid: Grid) -> BucketedTerms:
        return BucketedTerms(self.bucket, value=self.rows)


def _factory(*, heads: int, head_dim: int) -> Encoding:
    """An encoding drawn by PyTorch's global generator."""
    dice = random.Random(int(torch.randint(2**31, ())))
    rotation = (
        RandomRotation(dice, heads, head_dim) if dice.random() < 0.4 and head_dim > 1 else None
    )
    values = RandomValues(dice, heads, head_dim) if dice.random() < 0.3 else None
    alone = (rotation or values) is not None and dice.random() < 0.2
    score = None if alone else RandomTerms(dice, heads, head_dim)
    made = Encoding(query_key=rotation, score=score, value=values)
    return extend(made, "log_n", length=20) if dice.random() < 0.2 else made


ENTRY = Entry(
    factory=_factory,
    summary="Adds random terms.",
    sites=("query_key", "score", "value"),
    relative=False,
    trainable=True,
    extrapolates="Unknown.",
    cost="Any.",
)
