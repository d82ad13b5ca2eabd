"""Buckets by offset, biases that are tables by offset, and gather and sum by bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.encoding import BucketedTerms, ScoreTerm
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
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


class OffsetBias(ScoreTerm, ABC):
    """``s_ij += bias_h(Δ)``, Δ = j - i in tokens.

    A subclass defines ``bias``. On regular layouts the structured form is a table of the bias at
    every offset.
    """

    by_position = True

    @abstractmethod
    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, H * dims]:
        """The bias of every head at any real offsets, in float32 or better."""

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return self.bias(grid.offset[..., 0]).transpose(0, 1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        if grid.shift is None:
            return None
        dtype = torch.promote_types(grid.query.positions.dtype, grid.key.positions.dtype)
        offsets = grid.distinct_offsets(device=q.device).to(dtype)
        return (BucketedTerms(offset_index(grid), table=self.bias(offsets)),)
