"""Lowering of an encoding's parts to the structured form for fast backends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms, Encoding, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.parts import Part
from posenc.errors import ArgumentError
from posenc.grid import Grid


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
        if x is not None and not (
            x.dim() == len(sizes)
            and all(
                size is None or have == size or (have == 1 and at < shared)
                for at, (have, size) in enumerate(zip(x.shape, sizes, strict=True))
            )
        ):
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
    """LSE of the complete logits, from the LSE of logits without the ``row`` terms."""
    for row in rows_of(lowered):
        lse = lse + row
    return lse


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
    sinks: Float[Tensor, " H"] | None, lowered: Iterable[StructuredScore]
) -> Float[Tensor, "b H q"] | None:
    """Sinks less the ``row`` terms, for a softmax of logits without these terms."""
    if sinks is None:
        return None
    wide = torch.promote_types(sinks.dtype, torch.float32)
    return without_rows(sinks.to(wide).view(1, -1, 1), lowered)


def reads_tokens(term: StructuredScore) -> bool:
    """True if a term may depend on queries or keys: all but tables and values may."""
    if isinstance(term, LowRank):
        return True
    return any(part is not None for part in (term.left, term.right, term.row, term.column))


def is_constant_table(term: StructuredScore) -> bool:
    """True if a term is nothing but a table, whose entries need no gradient."""
    if isinstance(term, LowRank) or term.table is None:
        return False
    if term.table.requires_grad and torch.is_grad_enabled():
        return False
    others = (term.left, term.right, term.row, term.column, term.value)
    return all(other is None for other in others)
