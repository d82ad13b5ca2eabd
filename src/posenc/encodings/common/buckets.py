"""Buckets by offset, of regular grids or clipped; gather and sum by bucket with memory H·Q·K."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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


class ClippedTable(nn.Module):
    """A trained vector for each clipped offset: ``rows`` is ``[2k + 1, D]``, Xavier-uniform.

    Args:
        head_dim: width D.
        max_distance: k; larger offsets share the last row on their side.
    """

    def __init__(self, head_dim: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.rows = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.xavier_uniform_(self.rows)

    def forward(self) -> Float[Tensor, "N D"]:
        """The rows."""
        return self.rows

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Row of each offset Δ ``[..., 1]``: ``clip(round(Δ), -k, k) + k``."""
        return clipped_bucket(offset, self.max_distance)


def clipped_bucket(offset: Offsets, limit: int) -> BucketIndex:
    """``clip(round(Δ), -limit, limit) + limit`` of each offset Δ ``[..., 1]``."""
    return offset[..., 0].round().clamp(-limit, limit).long() + limit
