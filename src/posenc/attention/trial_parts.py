"""Parts of encodings that backends are tried with, of every form that kernels take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posenc.attention.problem.given_terms import GivenTerms, GivenValues
from posenc.encoding import (
    BlockTransforms,
    BucketedTerms,
    DistanceFunction,
    Encoding,
    FusedScore,
    GateCounts,
    ScoreTerm,
    StickWeights,
    TokenTableProduct,
    ValueTerm,
    repeat_heads,
)
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.grid import Grid

HEADS, WIDTH, FARTHEST, LONGEST = 4, 64, 40, 200
"""Sizes of the trial problems. Offsets beyond ``FARTHEST`` share an entry, so that tiles of all
kinds appear."""


ENTRIES = 2 * FARTHEST + 1

SIZES = {
    "table": (HEADS, ENTRIES),
    "left": (1, ENTRIES, WIDTH),
    "right": (1, ENTRIES, WIDTH),
    "column": (1, HEADS, LONGEST),
}
"""Shapes of the tensors of ``Structured``."""


def bucket(offset: Offsets) -> BucketIndex:
    """Clipped offsets."""
    return offset[..., 0].round().long().clamp(-FARTHEST, FARTHEST) + FARTHEST


class Structured(ScoreTerm):
    """A bias, rows for queries and for keys, by clipped offset, and a number a key, or some of it.

    Their definition is that of their structured form.
    """

    def __init__(self, generator: torch.Generator, *names: str) -> None:
        super().__init__()
        self.learned = nn.ParameterDict(
            {name: torch.randn(SIZES[name], generator=generator) for name in names}
        )

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        terms = GivenTerms(*self.lower(q, k, grid, scale=scale))
        return terms.forward(q, k, grid, scale=scale)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms:
        terms: dict[str, Any] = dict(self.learned)
        for name, tokens in (("left", q), ("right", repeat_heads(k, q.shape[1]))):
            if name in terms:
                terms[name] = TokenTableProduct(tokens, scale * terms[name])
        if "column" in terms:
            terms["column"] = terms["column"][..., : grid.key.length]
        return (BucketedTerms(bucket, **terms, max_distance=FARTHEST),)


class BucketedValues(ValueTerm):
    """Rows added to the values by clipped offset."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, ENTRIES, WIDTH, generator=generator))

    def forward(self, weights: Tensor, grid: Grid) -> Tensor:
        return GivenValues(self.lower(grid)).forward(weights, grid)

    def lower(self, grid: Grid) -> BucketedTerms:
        return BucketedTerms(bucket, value=self.rows, max_distance=FARTHEST)


class Reflected(ScoreTerm):
    """PaTH-like score: keys reflected by each token up to the query."""

    causal_only = True

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(1, HEADS, LONGEST, WIDTH, generator=generator))
        self.logits = nn.Parameter(torch.randn(1, HEADS, LONGEST, generator=generator))

    def _reflections(self, heads: slice, tokens: slice) -> tuple[Tensor, Tensor]:
        vectors = self.vectors[:, heads, tokens]
        return nn.functional.normalize(vectors, dim=-1), self.logits[:, heads, tokens].sigmoid()

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        keys = k.shape[2]
        every = self._reflections(slice(None), slice(0, keys))
        directions, strengths = (x.to(q.dtype) for x in every)
        product, rows, columns = q @ k.mT, torch.arange(keys, device=q.device), []
        for j in reversed(range(keys)):
            columns.append((q @ k[:, :, j, :, None]).squeeze(-1))
            along = q @ directions[:, :, j, :, None] * strengths[:, :, j, None, None]
            q = q - along.where((rows >= j)[:, None], 0.0) * directions[:, :, j, None]
        return scale * (torch.stack(columns[::-1], dim=-1) - product)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        parameters = (self.vectors, self.logits)
        k = repeat_heads(k, q.shape[1])
        return BlockTransforms.of_reflections(
            q, k, 0, parameters, reflections=self._reflections, scale=scale
        )


def _sums_from(values: Tensor) -> Tensor:
    """Sums over each key and those stored after it."""
    return values.flip(-1).cumsum(-1).flip(-1)


class Counted(ScoreTerm):
    """CoPE-like score: vectors at sums of the gates of a key and later ones."""

    causal_only = True

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(FARTHEST, WIDTH, generator=generator))

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        gates = (q @ k.mT * scale).sigmoid().masked_fill(~grid.visible, 0.0)
        count = _sums_from(gates).clamp(max=FARTHEST - 1)
        low = count.detach().floor().clamp(max=FARTHEST - 2)
        products = q @ self.rows.mT.to(q.dtype)
        first, second = (products.gather(-1, low.long() + step) for step in (0, 1))
        return first + (count - low) * (second - first)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return GateCounts(TokenTableProduct(q, self.rows[None]))


class Curved(ScoreTerm):
    """A function, bent at knots, of numbers by distance times rates by position."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.knots = 5 * torch.rand(FARTHEST, generator=generator).sort().values
        self.numbers = nn.Parameter(torch.arange(LONGEST + 1).log1p())
        self.rates = nn.Parameter(torch.linspace(1, 0.5, LONGEST))
        self.rises = nn.Parameter(torch.randn(HEADS, FARTHEST, generator=generator))

    def _rates(self, grid: Grid) -> Tensor:
        return self.rates[grid.query.positions[..., 0].long()]

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        numbers = self.numbers[grid.offset[..., 0].abs().long()]
        arguments = (numbers * self._rates(grid).unsqueeze(-1)).unsqueeze(-1)
        bent = (arguments - self.knots.to(arguments)).relu()
        return (bent @ self.rises.mT).movedim(-1, 1).to(q.dtype)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        knots = self.knots.to(self.rises)
        slope, intercept = (
            nn.functional.pad(each.cumsum(1), (1, 0)) for each in (self.rises, -self.rises * knots)
        )
        return DistanceFunction(
            lambda distance: self.numbers[distance.long()],
            self._rates(grid),
            knots,
            slope,
            intercept,
        )


class Broken(ScoreTerm):
    """Stick breaking: each key takes a share of what later keys have left, without a softmax."""

    causal_only = True
    replaces_product = True
    replaces_softmax = True

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logits, same_order = (
            q @ k.mT * scale,
            grid.key.order.unsqueeze(1) == grid.query.order.unsqueeze(2),
        )
        before = grid.visible & ~same_order.unsqueeze(1)
        left = nn.functional.logsigmoid(-logits).masked_fill(~before, 0.0)
        taken = nn.functional.logsigmoid(logits) + _sums_from(left) - left
        return taken.where(before, left.sum(-1, keepdim=True))

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return StickWeights(rest_to_self=True)


Kind = Callable[[torch.Generator], Encoding]

FULL_FORMULA: tuple[Kind, ...] = (
    lambda g: Encoding(score=Structured(g, "table", "left", "right"), value=BucketedValues(g)),
)

PARTS: tuple[Kind, ...] = (
    lambda g: Encoding(score=Structured(g, "table")),
    lambda g: Encoding(score=Structured(g, "column")),
    lambda g: Encoding(score=Reflected(g)),
)

KERNELS: dict[str, Kind] = {
    "distance": lambda g: Encoding(score=Curved(g)),
    "counts": lambda g: Encoding(score=Counted(g)),
    "sticks": lambda g: Encoding(score=Broken()),
}
"""Encodings that try the kernels of fused forms, by ``Plan.trial``."""
