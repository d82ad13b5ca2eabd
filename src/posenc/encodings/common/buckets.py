"""Gather and sum by bucket in the reference implementations; memory H·Q·K."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding.tensors import Queries

__all__ = ["gather_rows", "sum_by_bucket"]


def gather_rows(
    tokens: Queries, rows: Float[Tensor, "h N D"], buckets: Int[Tensor, "b Q K"]
) -> Float[Tensor, "B H Q K"]:
    """``tokens[b, h, i] · rows[h, buckets[b, i, j]]``."""
    products = tokens @ rows.to(tokens).mT
    batch, heads, queries, _ = products.shape
    index = buckets.unsqueeze(1).expand(batch, heads, queries, buckets.shape[-1])
    return products.gather(-1, index)


def sum_by_bucket(
    weights: Float[Tensor, "B H Q K"], rows: Float[Tensor, "h N D"], buckets: Int[Tensor, "b Q K"]
) -> Queries:
    """``Σ_j weights[b, h, i, j] · rows[h, buckets[b, i, j]]``."""
    sums = weights.new_zeros(*weights.shape[:-1], rows.shape[-2])
    sums = sums.scatter_add(-1, buckets.unsqueeze(1).expand_as(weights), weights)
    return sums @ rows.to(weights)
