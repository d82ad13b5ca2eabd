"""Shaw's keys and values against loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.shaw import shaw
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn


def make(max_distance: int = 2) -> tuple[Encoding, Tensor, Tensor]:
    encoding = shaw(head_dim=8, max_distance=max_distance).double().requires_grad_(False)
    assert encoding.score is not None
    assert encoding.value is not None
    return encoding, encoding.score.table.rows, encoding.value.table.rows


@pytest.mark.parametrize(("grid", "max_distance"), in_turn(2, GRIDS, [0, 2, 100]))
def test_equals_loops(grid: Grid, max_distance: int) -> None:
    q, k, v = inputs(grid)
    encoding, keys, values = make(max_distance)

    def index(at: float, to: float) -> int:
        return max(-max_distance, min(max_distance, round(to - at))) + max_distance

    expected = attention_by_loops(
        q,
        k,
        v,
        grid,
        key_vector=lambda h, at, to: keys[index(at, to)],
        value_vector=lambda h, at, to: values[index(at, to)],
    )
    torch.testing.assert_close(attend(q, k, v, grid, encoding), expected)


def test_a_number_by_hand() -> None:
    # Two tokens, head width 1, scale 1, q = 1, k = 0, so logits are a^K: 0 behind, log 3 here.
    encoding = shaw(head_dim=1, max_distance=1)
    with torch.no_grad():
        encoding.score.table.rows.copy_(torch.tensor([[0.0], [1.0986123], [0.0]]))
        encoding.value.table.rows.copy_(torch.tensor([[10.0], [20.0], [0.0]]))
    one, zero = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    grid = Grid.of(Layout.sequence(2), causal=True)
    output = attend(one, zero, zero, grid, encoding, scale=1.0)
    assert output.flatten().tolist() == pytest.approx([20.0, 17.5])
