"""Base class of score biases that are differences of token-dependent running sums."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Width, checked
from posenc.encoding import BucketedTerms, ScoreTerm
from posenc.encoding.tensors import (
    BucketIndex,
    Features,
    Keys,
    Offsets,
    Queries,
    Scores,
    StructuredTerms,
)
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.precision import WideLinear, at_least_single
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.grid import Grid
from posenc.layout import Layout


class SumDifference(ScoreTerm, ABC):
    """``s_ij += c_i - c_j``; a subclass defines ``sums``, which are c."""

    causal_only = True
    axes = None

    @abstractmethod
    def sums(self, grid: Grid) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H K"]]:
        """c at each query and each key."""

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        row, column = self.sums(grid)
        wide = torch.promote_types(q.dtype, torch.float32)
        return (row.unsqueeze(-1) - column.unsqueeze(-2)).to(wide)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        row, column = self.sums(grid)
        # Relative to the first query, sums near the diagonal are small and keep their precision.
        start = row[..., :1].detach()
        return (BucketedTerms(_one_bucket, row=row - start, column=start - column, max_distance=0),)


class GatedDecay(SumDifference):
    """``s_ij += c_i - c_j``, where c is the running sum of one step per token and head, by order.

    A subclass defines ``steps`` of ``gate(x)``, a linear map of the layer's input. Steps are stored
    in the layout's signal and summed at use, so cached values stay valid as tokens are appended.
    Sums run within a document, over real tokens, in float64.

    Args:
        dim: width C of the layer's input.
        heads: H.

    Raises:
        ArgumentError: when an argument is below 1.
    """

    heads: int

    pairwise = False

    @checked
    def __init__(self, *, dim: Width, heads: Count) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.gate = WideLinear(dim, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the gate's weights, standard deviation 0.02 as in the authors' code; zero bias."""
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.zeros_(self.gate.bias)

    @abstractmethod
    def steps(self, gates: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        """Each token's addend to the running sum, from the linear map of the layer's input."""

    def observe(self, x: Features, layout: Layout) -> Layout:
        return layout.with_signal(self.steps(self.gate(at_least_single(x))))

    def sums(self, grid: Grid) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H K"]]:
        steps = require_signal(grid.key, type(self).__name__, self.heads).mT
        if grid.key.valid is not None:
            steps = steps.masked_fill(~grid.key.valid.unsqueeze(1), 0.0)
        return KeyRanks.of(grid).running(steps)

    def of_sums(self) -> ScoreTerm:
        return SignalDifference(self.heads)


class SignalDifference(SumDifference):
    """``s_ij += c_i - c_j``, where c are the signals.

    Args:
        heads: H.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def sums(self, grid: Grid) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H K"]]:
        name, heads = type(self).__name__, self.heads or 0
        return require_signal(grid.query, name, heads).mT, require_signal(grid.key, name, heads).mT


def _one_bucket(offset: Offsets) -> BucketIndex:
    return torch.zeros_like(offset[..., 0], dtype=torch.int64)
