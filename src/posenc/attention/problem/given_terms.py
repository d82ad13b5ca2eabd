"""Parts whose structured form is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding import (
    BucketedTerms,
    Encoding,
    LowRank,
    ScoreTerm,
    StructuredScore,
    TokenTableProduct,
    ValueTerm,
)
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.grid import Grid

T = TypeVar("T")


class GivenTerms(ScoreTerm):
    """The score terms of one call, in structured form.

    Layers of transformers hold the weights; their terms are made anew in every call, so that
    adapters, offloading and sharding of the layer's modules take effect.

    Args:
        terms: for the queries and keys of the call.
    """

    axes = None

    def __init__(self, *terms: StructuredScore) -> None:
        super().__init__()
        self.computed = terms

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        first, *rest = self.computed
        return sum((_dense(term, grid) for term in rest), _dense(first, grid))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms:
        return self.computed


class GivenValues(ValueTerm):
    """The value term of one call, in structured form."""

    axes = None

    def __init__(self, term: BucketedTerms) -> None:
        super().__init__()
        self.computed = term

    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        assert self.computed.value is not None
        bucket, rows = self.computed.bucket(grid.offset), self.computed.value.to(weights)
        sums = weights.new_zeros(*weights.shape[:3], rows.shape[1])  # [B, H, Q, N]
        return sums.scatter_add(-1, bucket.unsqueeze(1).expand_as(weights), weights) @ rows

    def lower(self, grid: Grid) -> BucketedTerms:
        return self.computed


def given_encoding(terms: Iterable[StructuredScore]) -> Encoding:
    """An encoding whose structured form is ``terms``."""
    score: list[StructuredScore] = []
    value = None
    for term in terms:
        if isinstance(term, BucketedTerms) and term.value is not None:
            value = GivenValues(term)
        if isinstance(term, LowRank) or _adds_to_scores(term):
            score.append(term)
    return Encoding(score=GivenTerms(*score) if score else None, value=value)


def _adds_to_scores(term: BucketedTerms) -> bool:
    parts = (term.table, term.left, term.right, term.row, term.column)
    return any(part is not None for part in parts)


def _dense(term: StructuredScore, grid: Grid) -> Scores:
    """The logits ``[B|1, H, Q, K]`` of a term."""
    if isinstance(term, LowRank):
        return term.query @ term.key.mT
    bucket = term.bucket(grid.offset)  # [b, Q, K]
    logits = []
    if term.table is not None:
        logits.append(term.table[:, bucket].transpose(0, 1))
    if term.left is not None:
        logits.append(_at(bucket, term.left))
    if term.right is not None and bucket.shape[1] == 1:  # not all rows for one query
        tokens, rows = _factors(term.right)
        rows = rows[:, bucket[:, 0]].transpose(0, 1)  # [b, h, K, F]
        logits.append((tokens * rows).sum(-1).unsqueeze(-2))
    elif term.right is not None:
        logits.append(_at(bucket.mT, term.right).mT)
    if term.row is not None:
        logits.append(term.row.unsqueeze(-1))
    if term.column is not None:
        logits.append(term.column.unsqueeze(-2))
    return sum(logits[1:], logits[0])


def _at(bucket: Int[Tensor, "b L M"], product: TokenTableProduct) -> Float[Tensor, "b H L M"]:
    """Products of tokens with the rows of buckets."""
    tokens, rows = _factors(product)
    products = tokens @ rows.mT  # [b, H, L, N]
    batch = bucket.shape[0] if bucket.shape[0] > 1 else products.shape[0]  # len() is no symbol
    index = bucket.unsqueeze(1).expand(batch, products.shape[1], -1, -1)
    return products.expand(batch, -1, -1, -1).gather(-1, index)


def _factors(product: TokenTableProduct) -> tuple[Float[Tensor, "b H L F"], Float[Tensor, "h N F"]]:
    """Tokens and rows in float32 or better, as the definition multiplies them."""
    tokens, rows = product.tokens, product.rows
    wide = torch.promote_types(torch.promote_types(tokens.dtype, rows.dtype), torch.float32)
    return tokens.to(wide), rows.to(wide)


def map_term(function: Callable[[Tensor], Tensor], x: T) -> T:
    """A structured term with the function applied to its tensors, in order."""
    if isinstance(x, Tensor):
        return function(x)  # type: ignore[return-value]
    if isinstance(x, BucketedTerms | LowRank | TokenTableProduct):
        parts = {field.name: getattr(x, field.name) for field in fields(x)}
        return replace(x, **{name: map_term(function, part) for name, part in parts.items()})
    return x
