"""Score terms that a transformers layer has computed from its own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from posenc.attention.given_terms import GivenTerms
from posenc.encoding import BucketedTerms, Encoding, StructuredScore, TokenTableProduct
from posenc.encoding.tensors import BucketIndex, Offsets


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
