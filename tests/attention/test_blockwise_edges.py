"""The blockwise backend at the edges: no terms, no keys, widths that differ, padding alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc import Encoding, Grid, Layout, ScoreTerm, attend
from posenc.encoding import BucketedTerms, StructuredScore
from posenc.errors import BackendRefusal
from tests.attention.comparing import compare, results


class OfKeys(ScoreTerm):
    """``s_ij += k_j · w``: a number a key, and nothing that depends on the offset."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        column = (k @ self.weight).unsqueeze(-2)
        return column.expand(-1, -1, q.shape[2], -1)

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[StructuredScore, ...]:
        return (BucketedTerms(bucket=lambda offset: offset[..., 0].long(), column=k @ self.weight),)


def draw(queries: int, keys: int, width: int = 8, *, values: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, width), (keys, width), (keys, values))
    return [
        torch.randn(2, 2, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("values", [8, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("encoding", [Encoding(), Encoding(score=OfKeys(8))], ids=["none", "keys"])
def test_without_terms_of_the_offset(encoding: Encoding, causal: bool, values: int) -> None:
    grid = Grid.of(Layout.sequence(600), causal=causal)
    compare(draw(600, 600, values=values), grid, encoding, "blockwise", lse=False, tolerance=1e-9)


@pytest.mark.parametrize("name", ["nope", "t5", "shaw", "kerple", "deberta", "cope"])
def test_padding_alone_stays_in_the_graph(name: str) -> None:
    layout = Layout.sequence(7)
    grid = Grid.of(replace(layout, valid=torch.zeros(2, 7, dtype=torch.bool)), causal=True)
    encoding = posenc.create(name, dim=16, heads=2, head_dim=8, max_length=9, causal=True).double()
    tensors = draw(7, 7)
    assert attend(*tensors, grid, encoding, backend="blockwise").requires_grad  # type: ignore[arg-type]
    for found in results(tensors, grid, encoding, "blockwise", lse=False):
        assert torch.equal(found, torch.zeros_like(found))


def test_refuses_irregular_layouts_while_compiling() -> None:
    grid, encoding = Grid.of(Layout.packed([3, 4]), causal=True), Encoding()
    q, k, v = draw(7, 7)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="blockwise")

    compiled = torch.compile(step, backend="eager")
    with pytest.raises(BackendRefusal, match="inside a compiled graph"):
        compiled(q, k, v)


def test_factors_beside_rows_of_values() -> None:
    """Queries and values are widened by the factors, and the rows with them."""
    torch.manual_seed(3)
    factors = posenc.create("tupe", dim=16, heads=2, head_dim=8, max_length=80)
    values = posenc.create("shaw", head_dim=8, max_distance=3)
    encoding = Encoding(score=factors.score, value=values.value).double()
    grid = Grid.of(Layout.sequence(80))
    compare(draw(80, 80), grid, encoding, "blockwise", lse=False, tolerance=1e-9)


def test_sums_over_many_tokens_are_not_rounded() -> None:
    """Logarithms of gates add up: 1000 tokens on, float32 is 100 times less exact."""
    torch.manual_seed(3)
    encoding = posenc.create("forgetting", dim=16, heads=2)
    tensors = [x.detach().float() for x in draw(1000, 1000)]
    layout = encoding.observe(torch.randn(2, 1000, 16), Layout.sequence(1000))
    grid = Grid.of(layout, causal=True)
    q, k, v = tensors
    exact = attend(q.double(), k.double(), v.double(), grid, encoding, backend="reference")
    got = attend(q, k, v, grid, encoding, backend="blockwise")
    torch.testing.assert_close(got.double(), exact, atol=2e-6, rtol=0)
