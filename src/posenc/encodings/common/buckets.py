"""Buckets of regular grids; gather and sum by bucket with memory H·Q·K."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding.tensors import BucketIndex, Offsets, Queries
from posenc.grid import Grid


def offset_index(grid: Grid) -> Callable[[Offsets], BucketIndex]:
    """Bucket map of a regular grid: one bucket per offset, ascending."""
    first = grid.require_shift() - (grid.query.length - 1)
    return lambda offset: offset[..., 0].long() - first


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
