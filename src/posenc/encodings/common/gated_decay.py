"""What decays that are read from the tokens have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Width, checked
from posenc.encoding import BucketedTerms, ScoreTerm, StructuredScore
from posenc.encodings.common.precision import WideLinear
from posenc.encodings.common.prefix_sums import Ranks
from posenc.encodings.common.signals import require_signal
from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["GatedDecay"]


class GatedDecay(ScoreTerm, ABC):
    """``s_ij += c_i - c_j``, c the running sum of a number a token and head, by order.

    A subclass says how the number is made of ``gate(x)``, a linear map of the layer's input. It
    goes into the layout's signal, a number a token, and is summed when used: what was cached
    stays right whatever follows it. Sums run within a document, over real tokens, in float64.

    Args:
        dim: width C of the layer's input.
        heads: H.

    Raises:
        ArgumentError: when an argument is below 1.
    """

    causal_only = True
    axes = None

    @checked
    def __init__(self, *, dim: Width, heads: Count) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.gate = WideLinear(dim, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the gate's weights, deviation 0.02 as in the authors' code, and no bias."""
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.zeros_(self.gate.bias)

    @abstractmethod
    def steps(self, gates: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """What each token adds to the running sum, from the linear map of the layer's input."""

    def observe(self, x: Float[Tensor, "B L C"], layout: Layout) -> Layout:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return replace(layout, signal=self.steps(self.gate(wide)))

    def sums(self, grid: Grid) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H K"]]:
        """c at each query and each key, in float64."""
        steps = require_signal(grid.key, type(self).__name__, self.gate.out_features).mT
        if grid.key.valid is not None:
            steps = steps.masked_fill(~grid.key.valid.unsqueeze(1), 0.0)
        return Ranks.of(grid).running(steps)

    def forward(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B H K D"],
        grid: Grid,
        *,
        scale: float,
    ) -> Float[Tensor, "b H Q K"]:
        row, column = self.sums(grid)
        wide = torch.promote_types(q.dtype, torch.float32)
        return (row.unsqueeze(-1) - column.unsqueeze(-2)).to(wide)

    def lower(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B H K D"],
        grid: Grid,
        *,
        scale: float,
    ) -> tuple[StructuredScore, ...] | None:
        row, column = self.sums(grid)
        # Measured from the first query, the sums near the diagonal, which matter, are small.
        start = row[..., :1].detach()
        wide = torch.promote_types(q.dtype, torch.float32)
        row, column = (row - start).to(wide), (start - column).to(wide)
        return (BucketedTerms(_one_bucket, row=row, column=column, max_distance=0),)


def _one_bucket(offset: Float[Tensor, "*dims A"]) -> Int[Tensor, "*dims"]:
    return torch.zeros_like(offset[..., 0], dtype=torch.int64)
