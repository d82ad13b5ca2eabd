"""The contextual method against loops, and against its four terms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.contextual import ContextualScores, contextual
from posenc.encodings.score.shaw import ShawKeys
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn


def make(max_distance: int = 2) -> tuple[Encoding, Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    encoding = contextual(head_dim=8, max_distance=max_distance).double()
    assert isinstance(encoding.score, ContextualScores)
    assert encoding.value is not None
    return (
        encoding,
        encoding.score.query.rows,
        encoding.score.key.rows,
        encoding.value.get_parameter("table.rows"),
    )


@pytest.mark.parametrize(("grid", "max_distance"), in_turn(2, GRIDS, [0, 2, 100]))
def test_equals_loops(grid: Grid, max_distance: int) -> None:
    q, k, v = inputs(grid)
    encoding, queries, keys, values = make(max_distance)
    encoding.requires_grad_(False)

    def index(at: float, to: float) -> int:
        return max(-max_distance, min(max_distance, round(to - at))) + max_distance

    def logit(query: Tensor, key: Tensor, h: int, at: float, to: float) -> Tensor:
        n = index(at, to)
        return (query + queries[n]) @ (key + keys[n]) / math.sqrt(8)

    expected = attention_by_loops(
        q, k, v, grid, logit=logit, value_vector=lambda h, at, to: values[index(at, to)]
    )
    torch.testing.assert_close(attend(q, k, v, grid, encoding), expected)


def test_a_number_by_hand() -> None:
    # Width 1, scale 1, q = 2, k = 3; p^Q = 5 and p^K = 7 at offset 0: (2 + 5)(3 + 7) - 6 = 64.
    encoding = contextual(head_dim=1, max_distance=1)
    assert isinstance(encoding.score, ContextualScores)
    with torch.no_grad():
        encoding.score.query.rows.copy_(torch.tensor([[0.0], [5.0], [0.0]]))
        encoding.score.key.rows.copy_(torch.tensor([[0.0], [7.0], [0.0]]))
    q, k = torch.full((1, 1, 2, 1), 2.0), torch.full((1, 1, 2, 1), 3.0)
    scores = encoding.score(q, k, Grid.of(Layout.sequence(2)), scale=1.0)
    assert scores[0, 0].tolist() == [[64.0, 0.0], [0.0, 64.0]]


def test_position_with_position_is_counted() -> None:
    """METHODS: the p^Q·p^K term, which later forms leave out, is in."""
    encoding, queries, keys, _ = make()
    zero = torch.zeros(1, 1, 7, 8, dtype=torch.float64)
    grid = GRIDS["both ways"]
    assert encoding.score is not None
    scores = encoding.score(zero, zero, grid, scale=0.5)[0, 0]
    for i in range(7):
        for j in range(7):
            n = max(-2, min(2, j - i)) + 2
            assert scores[i, j].item() == pytest.approx((0.5 * queries[n] @ keys[n]).item())


def test_without_query_vectors_it_is_shaw() -> None:
    encoding, queries, keys, _ = make()
    shaw = ShawKeys(head_dim=8, max_distance=2).double()
    with torch.no_grad():
        queries.zero_()
        shaw.table.rows.copy_(keys)
    grid = GRIDS["causal"]
    q, k, v = inputs(grid)
    expected = attend(q, k, v, grid, Encoding(score=shaw, value=encoding.value))
    torch.testing.assert_close(attend(q, k, v, grid, encoding), expected)
