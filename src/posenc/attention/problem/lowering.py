"""Lowering of an encoding's parts to the structured form for fast backends."""

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
from posenc.encoding.parts import Part
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.runtime import is_scripted

T = TypeVar("T")


def lower(
    encoding: Encoding,
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    grid: Grid,
    *,
    scale: float,
    value_dim: int | None = None,
) -> tuple[StructuredScore, ...] | None:
    """Score and value parts in structured form: () if there are none, None if one has no such form.

    A part that replaces the product has none either: what it returns is no summand.
    ``value_dim`` is the width of the values, where it is to be checked.

    Raises:
        ArgumentError: when a part returns a tensor of a wrong shape, which kernels would read
            beyond its end.
    """
    lowered: tuple[StructuredScore, ...] = ()
    if encoding.score is not None:
        if encoding.score.replaces_product:
            return None
        terms = encoding.score.lower(q, k, grid, scale=scale)
        if terms is None:
            return None
        for summand in terms:
            _require_shapes(encoding.score, summand, q, k, value_dim)
        lowered += terms
    if encoding.value is not None:
        term = encoding.value.lower(grid)
        if term is None:
            return None
        _require_shapes(encoding.value, term, q, k, value_dim)
        lowered += (term,)
    return lowered


def _require_shapes(
    part: Part,
    term: StructuredScore,
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    value_dim: int | None,
) -> None:
    """Compare the shapes of a term with those of queries and keys; None: any size."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    shapes: list[tuple[str, Tensor | None, tuple[int | None, ...]]]
    if isinstance(term, LowRank):
        rank = term.query.shape[-1]
        shapes = [
            ("query", term.query, (batch, heads, queries, rank)),
            ("key", term.key, (batch, heads, keys, rank)),
        ]
    else:
        shapes = [
            ("table", term.table, (heads, None)),
            ("row", term.row, (batch, heads, queries)),
            ("column", term.column, (batch, heads, keys)),
            ("value", term.value, (heads, None, value_dim)),
        ]
        for name, product, count in (("left", term.left, queries), ("right", term.right, keys)):
            if product is not None:
                tokens, rows, width = product.tokens, product.rows, product.tokens.shape[-1]
                shapes.append((f"{name}.tokens", tokens, (batch, heads, count, width)))
                shapes.append((f"{name}.rows", rows, (heads, None, width)))
    for name, x, sizes in shapes:
        # Batch rows and heads may share what comes before the last two sizes.
        shared = len(sizes) - (1 if name in ("table", "row", "column") else 2)
        if x is None:
            continue
        fits = x.dim() == len(sizes)
        for at, (have, size) in enumerate(zip(x.shape, sizes, strict=False)):
            fits = fits and (size is None or have == size or (have == 1 and at < shared))
        if not fits:
            raise ArgumentError(
                f"{type(part).__name__}.lower",
                expected=f"{name} of shape {['any' if size is None else size for size in sizes]}",
                got=list(x.shape),
                remedy="Return tensors for the heads and tokens of these queries and keys.",
            )


def part_of(
    lowered: Iterable[StructuredScore], queries: slice, keys: slice
) -> tuple[StructuredScore, ...]:
    """The terms of some queries and keys."""

    def cut(x: Tensor | None, tokens: slice) -> Tensor | None:
        return None if x is None else x[:, :, tokens]

    def product(x: TokenTableProduct | None, tokens: slice) -> TokenTableProduct | None:
        return None if x is None else replace(x, tokens=x.tokens[:, :, tokens])

    return tuple(
        replace(term, query=term.query[:, :, queries], key=term.key[:, :, keys])
        if isinstance(term, LowRank)
        else replace(
            term,
            left=product(term.left, queries),
            right=product(term.right, keys),
            row=cut(term.row, queries),
            column=cut(term.column, keys),
        )
        for term in lowered
    )


def bias_by_offset(group: BucketedTerms, grid: Grid) -> Float[Tensor, "H offsets"]:
    """A group's table read at every offset of a regular grid, ascending: ``[H, Q + K - 1]``."""
    assert group.table is not None  # callers choose groups that have one
    offsets = grid.float_offsets(device=group.table.device)
    return group.table[:, group.bucket(offsets.unsqueeze(-1))]


def rows_of(lowered: Iterable[StructuredScore]) -> list[Float[Tensor, "b H Q"]]:
    """Summands that are the same for all keys of a query: no output depends on them."""
    rows = [term.row for term in lowered if isinstance(term, BucketedTerms)]
    return [row for row in rows if row is not None]


def add_rows(
    lse: Float[Tensor, "B H Q"], lowered: Iterable[StructuredScore]
) -> Float[Tensor, "B H Q"]:
    """LSE of the complete logits, from the LSE of logits without the ``row`` terms.

    Where a query sees no key it is -inf whatever the terms are, so that they get no gradient.
    """
    rows = rows_of(lowered)
    return torch.where(lse.isneginf(), lse, sum(rows, lse)) if rows else lse


def without_rows(
    lse: Float[Tensor, "B H Q"], lowered: Iterable[StructuredScore]
) -> Float[Tensor, "B H Q"]:
    """LSE of logits without the ``row`` terms, from the LSE of the complete logits."""
    for row in rows_of(lowered):
        lse = lse - row
    return lse


def has_rows(lowered: Iterable[StructuredScore]) -> bool:
    """True if a term is the same for all keys of a query."""
    return bool(rows_of(lowered))


def sinks_without_rows(
    sinks: Float[Tensor, " H"], lowered: Iterable[StructuredScore]
) -> Float[Tensor, "b H q"]:
    """Sinks less the ``row`` terms, for a softmax of logits without these terms."""
    wide = torch.promote_types(sinks.dtype, torch.float32)
    return without_rows(sinks.to(wide).view(1, -1, 1), lowered)


def reads_tokens(term: StructuredScore) -> bool:
    """True if a term may depend on queries or keys: all but tables and values may."""
    if isinstance(term, LowRank):
        return True
    products = term.left is not None or term.right is not None
    return products or term.row is not None or term.column is not None


def is_constant_table(term: StructuredScore) -> bool:
    """True if a term is nothing but a table, whose entries need no gradient."""
    if isinstance(term, LowRank) or term.table is None:
        return False
    if term.table.requires_grad and torch.is_grad_enabled():
        return False
    return not reads_tokens(term) and term.value is None


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
        if isinstance(term, LowRank) or reads_tokens(term) or term.table is not None:
            score.append(term)
    return Encoding(score=GivenTerms(*score) if score else None, value=value)


def _dense(term: StructuredScore, grid: Grid) -> Scores:
    """The logits ``[B|1, H, Q, K]`` of a term."""
    if isinstance(term, LowRank):
        query, key = _wider(term.query, term.key)
        return query @ key.mT
    bucket = term.bucket(grid.offset)  # [b, Q, K]
    logits = []
    if term.table is not None:
        of_pairs = term.table.index_select(1, bucket.flatten())  # several times as fast as indexing
        logits.append(of_pairs.view(term.table.shape[0], *bucket.shape).transpose(0, 1))
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
    """Products of tokens with the rows of buckets, no more at a time than there are pairs."""
    tokens, rows = _factors(product)
    if torch.compiler.is_compiling() or is_scripted():  # no size is read
        return _read_products(bucket, tokens, rows)
    size = max(1, bucket.shape[1] * bucket.shape[2] // rows.shape[1])
    if size >= bucket.shape[1]:
        return _read_products(bucket, tokens, rows)
    pieces = zip(torch.split(bucket, size, 1), torch.split(tokens, size, 2), strict=True)
    return torch.cat([_read_products(*piece, rows) for piece in pieces], dim=2)


def _read_products(
    bucket: Int[Tensor, "b L M"], tokens: Float[Tensor, "b H L F"], rows: Float[Tensor, "h N F"]
) -> Float[Tensor, "b H L M"]:
    products = tokens @ rows.mT  # [b, H, L, N]
    batch = bucket.shape[0] if bucket.shape[0] > 1 else products.shape[0]  # len() is no symbol
    index = bucket.unsqueeze(1).expand(batch, products.shape[1], -1, -1)
    return products.expand(batch, -1, -1, -1).gather(-1, index)


def _factors(product: TokenTableProduct) -> tuple[Float[Tensor, "b H L F"], Float[Tensor, "h N F"]]:
    """Tokens and rows in float32 or better, as the definition multiplies them."""
    tokens, rows = _wider(product.tokens, product.rows)
    wide = torch.promote_types(tokens.dtype, torch.float32)
    return tokens.to(wide), rows.to(wide)


def _wider(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes: factors by float64 positions are float64."""
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


def map_term(function: Callable[[Tensor], Tensor], x: T) -> T:
    """A structured term with the function applied to its tensors, in order."""
    if isinstance(x, Tensor):
        return function(x)  # type: ignore[return-value]
    if isinstance(x, BucketedTerms | LowRank | TokenTableProduct):
        parts = {field.name: getattr(x, field.name) for field in fields(x)}
        return replace(x, **{name: map_term(function, part) for name, part in parts.items()})
    return x
