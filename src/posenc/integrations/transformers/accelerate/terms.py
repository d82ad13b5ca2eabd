"""Score terms that a transformers layer has computed from its own weights."""

from __future__ import annotations

from torch import Tensor

from posenc.encoding import BucketedTerms, Encoding, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.grid import Grid


class GivenTerms(ScoreTerm):
    """The score terms of one call, in structured form.

    Layers of transformers hold the weights; their terms are made anew in every call, so that
    adapters, offloading and sharding of the layer's modules take effect.

    Args:
        terms: for the queries and keys of the call.
    """

    axes = None

    def __init__(self, *terms: BucketedTerms) -> None:
        super().__init__()
        self.computed = terms

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        first, *rest = self.computed
        return sum((_dense(term, grid) for term in rest), _dense(first, grid))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms:
        return self.computed


def encoding_of(*terms: BucketedTerms) -> Encoding:
    """The encoding whose score part has these terms; none for no terms."""
    return Encoding(score=GivenTerms(*terms)) if terms else Encoding()


def _dense(term: BucketedTerms, grid: Grid) -> Scores:
    """The logits ``[B|1, H, Q, K]`` of a term."""
    bucket = term.bucket(grid.offset)  # [b, Q, K]
    logits = []
    if term.table is not None:
        logits.append(term.table[:, bucket].transpose(0, 1))
    if term.left is not None:
        products = term.left.tokens @ term.left.rows.mT  # [B, H, Q, N]
        logits.append(products.gather(-1, _expanded(bucket, products)))
    if term.right is not None:
        products = term.right.tokens @ term.right.rows.mT  # [B, H, K, N]
        logits.append(products.gather(-1, _expanded(bucket.mT, products)).mT)
    if term.row is not None:
        logits.append(term.row.unsqueeze(-1))
    if term.column is not None:
        logits.append(term.column.unsqueeze(-2))
    return sum(logits[1:], logits[0])


def _expanded(bucket: Tensor, products: Tensor) -> Tensor:
    return bucket.unsqueeze(1).expand(*products.shape[:3], -1)
