"""Parts of an encoding restricted to a range of query heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.lowered import BucketedTerms, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.parts import Part, Projection, QueryKeyTransform, ScoreTerm, ValueTerm
from posenc.encoding.tensors import Features, Keys, Queries, Scores, StructuredTerms, repeat_heads
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout


@dataclass(frozen=True)
class HeadRange:
    """Heads ``begin`` to ``end`` (exclusive) of ``count``."""

    begin: int
    end: int
    count: int

    def fill(self, x: Float[Tensor, "B n *dims"]) -> Float[Tensor, "B H *dims"]:
        """Expand to all heads: these heads keep their values, others get copies."""
        index = torch.arange(self.count, device=x.device) - self.begin
        return x[:, index.clamp(0, self.end - self.begin - 1)]

    def cut(self, x: Float[Tensor, "B h *dims"], dim: int = 1) -> Float[Tensor, "B n *dims"]:
        """Slice these heads; a dimension of size 1, shared by all heads, is kept."""
        if x.shape[dim] == 1:
            return x
        return x.narrow(dim, self.begin, self.end - self.begin)

    def cut_term(self, term: StructuredScore) -> StructuredScore:
        """Slice the heads of a structured term."""
        if isinstance(term, LowRank):
            return LowRank(self.cut(term.query), self.cut(term.key))
        value = None if term.value is None else self.cut(term.value, 0)
        return replace(
            term,
            table=None if term.table is None else self.cut(term.table, 0),
            left=self._cut_product(term.left),
            right=self._cut_product(term.right),
            row=None if term.row is None else self.cut(term.row),
            column=None if term.column is None else self.cut(term.column),
            value=value,
        )

    def _cut_product(self, product: TokenTableProduct | None) -> TokenTableProduct | None:
        if product is None:
            return None
        return TokenTableProduct(self.cut(product.tokens), self.cut(product.rows, 0))


def range_of(part: Part, begin: int, end: int) -> HeadRange | None:
    """The range of a part's query heads; None for a part without heads.

    Raises:
        ArgumentError: if it has no such heads, or a head's result depends on other heads.
    """
    if part.mixes_heads:
        raise ArgumentError(
            "encoding",
            expected="one whose heads are independent",
            got=f"{type(part).__name__}, which mixes heads",
            remedy="Use all of its heads on one device.",
        )
    views = getattr(part, "views", 1)
    count = end if part.heads is None else part.heads
    if not 0 <= begin < end <= count or begin % views or end % views:
        most = "" if part.heads is None else f" ≤ {count}"
        raise ArgumentError(
            "begin, end",
            expected=f"0 ≤ begin < end{most}" + ("" if views == 1 else f", multiples of {views}"),
            got=f"{begin}, {end}",
            remedy="Count the encoding's query heads from 0.",
        )
    return None if part.heads is None else HeadRange(begin, end, count)


CLAIMS = {name for kind in (Part, QueryKeyTransform, ScoreTerm) for name in kind.__annotations__}
"""Class attributes of a part, which also hold for a range of its heads."""


class SomeHeads(Part):
    """A part that computes all heads with ``whole`` and keeps a range of them."""

    def __init__(self, whole: Any, heads: HeadRange) -> None:
        super().__init__()
        self.whole, self.range = whole, heads
        # instance attributes that shadow those of the class
        claims = {name: getattr(whole, name) for name in CLAIMS if hasattr(whole, name)}
        self.__dict__.update(claims, given={}, heads=heads.end - heads.begin)

    def observe(self, x: Features, layout: Layout) -> Layout:
        observed: Layout = self.whole.observe(x, layout)
        return observed

    def attach(self, query: Projection, key: Projection) -> None:
        self.whole.attach(query, key)


class SomeHeadsTransform(SomeHeads, QueryKeyTransform):
    """Some heads of a query_key part; keys are expanded to one head per query head."""

    def forward(
        self, q: Queries, k: Keys, grid: Grid
    ) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H K E"]]:
        k = self.range.fill(repeat_heads(k, q.shape[1]))
        q, k = self.whole(self.range.fill(q), k, grid)
        return self.range.cut(q), self.range.cut(k)


class SomeHeadsScore(SomeHeads, ScoreTerm):
    """Some heads of a score part."""

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        score: Tensor = self.whole(self.range.fill(q), self.range.fill(k), grid, scale=scale)
        return self.range.cut(score)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        k = self.range.fill(repeat_heads(k, q.shape[1]))
        terms = self.whole.lower(self.range.fill(q), k, grid, scale=scale)
        return None if terms is None else tuple(self.range.cut_term(term) for term in terms)


class SomeHeadsValue(SomeHeads, ValueTerm):
    """Some heads of a value part."""

    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        values: Tensor = self.whole(self.range.fill(weights), grid)
        return self.range.cut(values)

    def lower(self, grid: Grid) -> BucketedTerms | None:
        term: BucketedTerms | None = self.whole.lower(grid)
        if term is None or term.value is None:
            return term
        return replace(term, value=self.range.cut(term.value, 0))
