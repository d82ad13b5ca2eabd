"""Base class of biases that depend on the offset alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import offset_index
from posenc.grid import Grid


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
