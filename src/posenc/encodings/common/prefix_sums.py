"""Sums over the tokens between a key and a query, by order, and biases that are such sums.

Keys may be stored in any arrangement (shards, beams, packed rows): a key's index in its tensor
need not be its order in the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Width
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
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import widest


@dataclass(frozen=True, eq=False)
class KeyRanks:
    """Ranks of queries and keys among a grid's keys sorted by document and order, padding last.

    Args:
        arrangement: ``[b, K]``, index of the key at each rank; None if keys are stored sorted.
        before: ``[b, K]``, number of keys ranked strictly below each key (lower order in the same
            document, or an earlier document).
        until: ``[b, K]``, the same including keys of equal order (and the key itself).
        query_until: ``[b, Q]``, ``until`` for queries.
    """

    arrangement: Int[Tensor, "b K"] | None
    before: Int[Tensor, "b K"]
    until: Int[Tensor, "b K"]
    query_until: Int[Tensor, "b Q"]

    @classmethod
    def of(cls, grid: Grid) -> KeyRanks:
        """The ranks of a grid's keys and queries; does not synchronize with the device."""
        places, query_places = _places(grid.key, grid.query)
        if grid.key.start is not None and not grid.segmented:
            before, query_until = places - grid.key.start, query_places - grid.key.start + 1
            return cls(None, before, before + 1, query_until.clamp(0, grid.key.length))
        ordered, arrangement = places.sort(dim=-1, stable=True)
        return cls(
            arrangement,
            _count(ordered, places, right=False),
            _count(ordered, places, right=True),
            _count(ordered, query_places, right=True),
        )

    @property
    def of_keys(self) -> Int[Tensor, "b K"]:
        """Each key's rank; keys of equal order are ranked as stored."""
        if self.arrangement is None:
            return torch.arange(self.before.shape[-1], device=self.before.device).unsqueeze(0)
        return self.arrangement.argsort(dim=-1)

    def arrange(self, values: Float[Tensor, "b *dims K"]) -> Float[Tensor, "b *dims K"]:
        """``values`` of the keys in the order of their ranks."""
        return values if self.arrangement is None else _read(values, self.arrangement)

    def running(
        self, values: Float[Tensor, "b H K"]
    ) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H K"]]:
        """Sum of ``values`` up to each query and up to each key, in float64.

        Their difference is the sum over the keys after the key and up to the query; float64 avoids
        cancellation after thousands of addends.
        """
        wide = self.arrange(values.to(widest(values.device)))
        sums = torch.nn.functional.pad(wide.cumsum(-1), (1, 0))
        return _read(sums, self.query_until), _read(sums, self.until)

    def earlier(
        self, values: Float[Tensor, "b F K"], steps: int, key: Layout
    ) -> Float[Tensor, "b F K"]:
        """``values`` of the key ``steps`` ranks before each key in its document, 0 without one."""
        ranks = self.of_keys - steps
        index = ranks.clamp(min=0)
        if self.arrangement is not None:
            index = self.arrangement.gather(-1, index)
        exists = ranks >= 0
        if key.document is not None:
            rows = max(index.shape[0], key.document.shape[0])
            index, document = (x.expand(rows, -1) for x in (index, key.document))
            exists = exists & (document.gather(-1, index) == document)
        return _read(values, index).masked_fill(~exists.unsqueeze(1), 0.0)

    def from_key(self, values: Scores) -> Scores:
        """For each key, the sum of a query's ``values`` over this key and those after it."""
        sums = self.arrange(values).flip(-1).cumsum(-1).flip(-1)
        return _read(sums, self.before)

    def after_key(self, values: Scores) -> Scores:
        """For each key, the sum of a query's ``values`` over those after it.

        Among keys of equal order, those stored later count as after.
        """
        sums = self.arrange(values).flip(-1).cumsum(-1).flip(-1)
        later = torch.nn.functional.pad(sums, (0, 1))[..., 1:]
        return later if self.arrangement is None else _read(later, self.of_keys)


def _places(key: Layout, query: Layout) -> tuple[Int[Tensor, "b K"], Int[Tensor, "b Q"]]:
    """A sort key per token: by document, then by order, padding last."""
    last = torch.iinfo(torch.int64).max
    if key.document is None and query.document is None:
        order = key.order if key.valid is None else key.order.where(key.valid, last)
        return order, query.order
    least = torch.minimum(key.order.min(), query.order.min())
    most = torch.maximum(key.order.max(), query.order.max())
    places = []
    for side in (key, query):
        document = 0 if side.document is None else side.document
        places.append(document * (most - least + 1) + side.order - least)
    if key.valid is not None:
        places[0] = places[0].where(key.valid, last)
    return places[0], places[1]


def _count(ordered: Tensor, places: Tensor, *, right: bool) -> Int[Tensor, "b N"]:
    """Number of ``ordered`` values below each of ``places``; with ``right``, below or equal."""
    rows = max(ordered.shape[0], places.shape[0])
    expanded = (side.expand(rows, -1).contiguous() for side in (ordered, places))
    return torch.searchsorted(*expanded, right=right)


def _read(values: Tensor, index: Int[Tensor, "b N"]) -> Tensor:
    """``values[b, ..., index[b, n]]``, batch dimensions broadcast."""
    rows = max(values.shape[0], index.shape[0])
    middle = values.shape[1:-1]
    values = values.expand(rows, *middle, values.shape[-1])
    index = index.view(index.shape[0], *(1 for _ in middle), index.shape[-1])
    return values.gather(-1, index.expand(rows, *middle, index.shape[-1]))


class GatedDecay(ScoreTerm, ABC):
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

    causal_only = True
    pairwise = False
    axes = None

    dim: Width
    heads: Count

    def __post_init__(self) -> None:
        self.gate = WideLinear(self.dim, self.heads)

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
        """c at each query and each key."""
        steps = require_signal(grid.key, type(self).__name__, self.heads).mT
        if grid.key.valid is not None:
            steps = steps.masked_fill(~grid.key.valid.unsqueeze(1), 0.0)
        return KeyRanks.of(grid).running(steps)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        row, column = self.sums(grid)
        wide = torch.promote_types(q.dtype, torch.float32)
        return (row.unsqueeze(-1) - column.unsqueeze(-2)).to(wide)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        row, column = self.sums(grid)
        # Relative to the first query, sums near the diagonal are small and keep their precision.
        start = row[..., :1].detach()
        return (BucketedTerms(_one_bucket, row=row - start, column=start - column, max_distance=0),)


def _one_bucket(offset: Offsets) -> BucketIndex:
    return torch.zeros_like(offset[..., 0], dtype=torch.int64)
