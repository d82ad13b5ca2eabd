"""Score terms that a transformers layer has computed from its own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from posenc.encoding import (
    BucketedTerms,
    Encoding,
    LowRank,
    ScoreTerm,
    StructuredScore,
    TokenTableProduct,
)
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.grid import Grid


class ComputedOnce:
    """Mixin of records with a function ``compute`` whose result is kept as ``dense``."""

    compute: Callable[[], Any]
    _result: Any = None

    @property  # not cached_property, whose lock in Python 3.11 the compiler cannot trace
    def dense(self) -> Any:
        """The tensor written out for all pairs, computed once for all layers."""
        if self._result is None:
            self._result = self.compute()
        return self._result


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


def encoding_of(*terms: StructuredScore) -> Encoding:
    """The encoding whose score part has these terms; none for no terms."""
    return Encoding(score=GivenTerms(*terms)) if terms else Encoding()


def products_by_offset(
    tokens: Float[Tensor, "B H Q E"], rows: Float[Tensor, "h N E"], behind: int
) -> BucketedTerms:
    """Products of queries with a row for each offset, clipped to those that have one.

    Args:
        tokens: queries, scaled.
        rows: for the offsets ``-behind`` … ``N - 1 - behind``, in order.
        behind: the largest distance to keys before a query that has a row of its own.
    """
    last = rows.shape[1] - 1

    def bucket(offset: Offsets) -> BucketIndex:
        return (offset[..., 0].long() + behind).clamp(0, last)

    left = TokenTableProduct(tokens, rows)
    return BucketedTerms(bucket, left=left, max_distance=max(behind, last - behind))


def _dense(term: StructuredScore, grid: Grid) -> Scores:
    """The logits ``[B|1, H, Q, K]`` of a term."""
    if isinstance(term, LowRank):
        return term.query @ term.key.mT
    bucket = term.bucket(grid.offset)  # [b, Q, K]
    logits = []
    if term.table is not None:
        logits.append(term.table[:, bucket].transpose(0, 1))
    if term.left is not None:
        products = _products(term.left)  # [B, H, Q, N]
        logits.append(products.gather(-1, _expanded(bucket, products)))
    if term.right is not None:
        products = _products(term.right)  # [B, H, K, N]
        logits.append(products.gather(-1, _expanded(bucket.mT, products)).mT)
    if term.row is not None:
        logits.append(term.row.unsqueeze(-1))
    if term.column is not None:
        logits.append(term.column.unsqueeze(-2))
    return sum(logits[1:], logits[0])


def _products(product: TokenTableProduct) -> Float[Tensor, "b H L N"]:
    """Products of all tokens with all rows, which have another dtype under autocast."""
    return product.tokens @ product.rows.to(product.tokens.dtype).mT


def _expanded(bucket: Tensor, products: Tensor) -> Tensor:
    return bucket.unsqueeze(1).expand(*products.shape[:3], -1)
