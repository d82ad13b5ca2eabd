"""Logits multiplied by a factor of each query, which depends on how many keys it sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.lowered import LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.parts import Part, Projection, QueryKeyTransform, ScoreTerm
from posenc.encoding.tensors import Features, Keys, Queries, Scores, StructuredTerms
from posenc.grid import Grid, seen_lengths
from posenc.layout import Layout

SHARED = ("axes", "causal_only", "heads", "head_dim", "dim", "causal", "mixes_heads")
"""Attributes of a part that a wrapper has too."""

LEAST = 2.0**-14
"""Least size of a factor. Scores that read queries divide by it what ``ScaledQueries`` returned."""


class LogitFactor(Part, ABC):
    """κ, the factor of a query's logits, biases included; see ``Encoding.scaled``."""

    axes: ClassVar[tuple[int, ...] | None] = None

    of_position: bool = False
    """True if n is the query's position + 1 without a causal mask too."""

    @abstractmethod
    def forward(self, n: Float[Tensor, "b q"]) -> Float[Tensor, "b h q"]:
        """κ of queries that see ``n`` keys, in the dtype of ``n``; of each head, or of all."""


class _Scaled(Part):
    """Common to both parts: all they take from the one inside."""

    inner: Part | None
    factor: LogitFactor
    pairwise = False

    def observe(self, x: Features, layout: Layout) -> Layout:
        return layout if self.inner is None else self.inner.observe(x, layout)

    def attach(self, query: Projection, key: Projection) -> None:
        if self.inner is not None:
            self.inner.attach(query, key)

    def of_queries(self, grid: Grid) -> Float[Tensor, "b h q 1"]:
        """κ of each query: of its position + 1 under a causal mask, else of its row's length."""
        by_position = grid.causal or self.factor.of_position
        n = grid.query.positions[..., 0] + 1 if by_position else seen_lengths(grid)[0]
        factor: Tensor = self.factor(n).unsqueeze(-1)
        return factor.where(factor.abs() >= LEAST, LEAST)

    def _take_over(self, *names: str) -> None:
        """Have the attributes of the part inside."""
        inner = self.inner
        shared: dict[str, object] = {"axes": None}
        if inner is not None:
            shared = {name: getattr(inner, name) for name in SHARED + names}
        inner_axes, axes = None if inner is None else inner.axes, self.factor.axes
        if axes is not None:
            shared["axes"] = axes if inner_axes is None else tuple({*axes} & {*inner_axes})
        if self.factor.heads is not None:
            shared["heads"] = self.factor.heads
        self.__dict__.update(shared)


class ScaledQueries(_Scaled, QueryKeyTransform):
    """Queries times κ, after an optional transform."""

    inner: QueryKeyTransform | None

    def __post_init__(self) -> None:
        self._take_over("scale", "tokenwise", "views", "widening")

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Tensor, Tensor]:
        if self.inner is not None:
            q, k = self.inner(q, k, grid)
        return (q * self.of_queries(grid)).to(q.dtype), k

    def logit_factor(self, grid: Grid) -> Float[Tensor, "b h q 1"]:
        factor = self.of_queries(grid)
        return factor if self.inner is None else factor * self.inner.logit_factor(grid)


class ScaledScore(_Scaled, ScoreTerm):
    """A score part times κ, beside ``ScaledQueries`` unless it replaces the product."""

    reads_layout = True

    inner: ScoreTerm

    def __post_init__(self) -> None:
        self._take_over("terms", "replaces_product")

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        factor = self.of_queries(grid)
        scores: Tensor = self.inner(self._plain(q, factor), k, grid, scale=scale)
        return scores * factor.to(torch.promote_types(scores.dtype, factor.dtype))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        factor = self.of_queries(grid)
        terms = self.inner.lower(self._plain(q, factor), k, grid, scale=scale)
        scaled = None if terms is None else [_scaled(term, factor, grid) for term in terms]
        if scaled is None or None in scaled:
            return None
        return tuple(term for times in scaled for term in times or ())

    def _plain(self, q: Tensor, factor: Float[Tensor, "b h q 1"]) -> Tensor:
        """Queries before the scaling by ``ScaledQueries``."""
        return q if self.replaces_product else (q / factor).to(q.dtype)


def is_scaled(score: ScoreTerm | None, factor: LogitFactor) -> bool:
    """True if nothing is left to multiply by κ in a score part.

    The logits of bands are products with the queries, which are multiplied by it.
    """
    while isinstance(score, ScaledScore):
        if score.factor is factor:
            return True
        score = score.inner
    return score is None or has_bands(score)


def has_bands(score: ScoreTerm) -> bool:
    """True if a part's logits are products of rotated queries and keys."""
    return type(score).bands is not ScoreTerm.bands


def _scaled(
    term: StructuredScore, factor: Float[Tensor, "b h q 1"], grid: Grid
) -> StructuredTerms | None:
    """The term times κ; None if a term by offset depends on the content of the key."""
    if isinstance(term, LowRank):
        return (replace(term, query=term.query * factor),)
    if term.right is not None:
        return None
    queries = grid.query.length
    tokens, rows = [], []
    if term.left is not None:
        tokens.append(term.left.tokens * factor)
        rows.append(term.left.rows)
    if term.table is not None:
        tokens.append(factor.to(term.table).expand(-1, len(term.table), queries, -1))
        rows.append(term.table.unsqueeze(-1))
    left = None
    if tokens:
        batch, most = max(x.shape[0] for x in tokens), max(x.shape[1] for x in tokens)
        many = max(x.shape[0] for x in rows)
        left = TokenTableProduct(
            torch.cat([x.expand(batch, most, -1, -1) for x in tokens], dim=-1),
            torch.cat([x.expand(many, -1, -1) for x in rows], dim=-1),
        )
    row = None if term.row is None else term.row * factor.squeeze(-1)
    scaled = replace(term, table=None, left=left, row=row, column=None)
    if term.column is None:
        return (scaled,)
    heads = max(term.column.shape[1], factor.shape[1])
    query = factor.to(term.column).expand(-1, heads, queries, -1)
    return scaled, LowRank(query, term.column.unsqueeze(-1))
