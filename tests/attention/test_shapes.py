"""Parts whose structured form or transform has a wrong shape, which kernels would read beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posenc.attention import attend
from posenc.attention.backends.native import build as building
from posenc.encoding import (
    BucketedTerms,
    Encoding,
    LowRank,
    QueryKeyTransform,
    ScoreTerm,
    StructuredScore,
    TokenTableProduct,
    ValueTerm,
)
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout

HEADS, LENGTH, DIM = 8, 70, 16
GRID = Grid.of(Layout.sequence(LENGTH), causal=True)


def bucket(offset: Tensor) -> Tensor:
    return offset[..., 0].long() + LENGTH


def product(heads: int, tokens: int, width: int, row_heads: int = HEADS) -> TokenTableProduct:
    return TokenTableProduct(
        torch.zeros(1, heads, tokens, width), torch.zeros(row_heads, 2 * LENGTH, DIM)
    )


TERMS: dict[str, Callable[[], StructuredScore]] = {
    "table": lambda: BucketedTerms(bucket, table=torch.zeros(2, 2 * LENGTH)),
    "row": lambda: BucketedTerms(bucket, row=torch.zeros(1, HEADS, LENGTH // 2)),
    "column": lambda: BucketedTerms(bucket, column=torch.zeros(1, HEADS, LENGTH // 2)),
    "left.tokens": lambda: BucketedTerms(bucket, left=product(HEADS, LENGTH // 2, DIM)),
    "left.rows": lambda: BucketedTerms(bucket, left=product(HEADS, LENGTH, DIM // 2)),
    "right.tokens": lambda: BucketedTerms(bucket, right=product(2, LENGTH, DIM)),
    "right.rows": lambda: BucketedTerms(bucket, right=product(HEADS, LENGTH, DIM, 2)),
    "query": lambda: LowRank(torch.zeros(1, HEADS, 3, 4), torch.zeros(1, HEADS, LENGTH, 4)),
    "key": lambda: LowRank(torch.zeros(1, HEADS, LENGTH, 4), torch.zeros(1, HEADS, LENGTH, 5)),
}


class Terms(ScoreTerm):
    def __init__(self, term: StructuredScore) -> None:
        super().__init__()
        self.term = term

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        return q.new_zeros(1, 1, q.shape[2], k.shape[2])

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[StructuredScore, ...]:
        return (self.term,)


class Values(ValueTerm):
    def forward(self, weights: Tensor, grid: Grid) -> Tensor:
        return weights.new_zeros(*weights.shape[:3], DIM)

    def lower(self, grid: Grid) -> BucketedTerms:
        return BucketedTerms(bucket, value=torch.zeros(1, 2 * LENGTH, DIM // 2))


class Halved(QueryKeyTransform):
    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return q, k.repeat(1, 1, 2, 1)


@pytest.mark.parametrize("backend", ["native", "blockwise", "sdpa", "reference", "auto"])
@pytest.mark.parametrize("name", [*TERMS, "value", "forward"])
def test_wrong_shapes_raise_before_any_kernel_reads(name: str, backend: str) -> None:
    if backend == "native" and building.missing() is not None:
        pytest.skip(f"kernels are not built; {building.COMMAND}")
    part: ScoreTerm | ValueTerm | QueryKeyTransform
    part = Halved() if name == "forward" else Values() if name == "value" else Terms(TERMS[name]())
    q = torch.randn(1, HEADS, LENGTH, DIM)
    with pytest.raises(ArgumentError, match=rf"(lower: expected {name} of|Halved.forward: )"):
        attend(q, q, q, GRID, Encoding.of(part), backend=backend)
