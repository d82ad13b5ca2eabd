"""Shaw's keys and values against loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention import LayerCache
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


def test_each_cached_token_of_a_chunk_has_its_own_row() -> None:
    """transformers #19045: cached multi-token chunks all got the last query's positions."""
    encoding, _, _ = make()
    torch.manual_seed(1)
    layer = posenc.Attention(dim=16, heads=2, encoding=encoding, causal=True).double().eval()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    cache = LayerCache()
    first = layer(x[:, :4], Layout.sequence(4), cache=cache)
    second = layer(x[:, 4:], Layout.sequence(5, start=4), cache=cache)
    whole = layer(x, Layout.sequence(9))
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_offsets_beyond_every_row_are_clipped() -> None:
    """transformers #17026: an index error beyond the maximum."""
    encoding, _, _ = make()
    grid = Grid(Layout.sequence(1, start=10**6), Layout.sequence(1))
    q, k, v = inputs(grid)
    assert attend(q, k, v, grid, encoding).isfinite().all()


def test_clip_zero_knows_no_order() -> None:
    """FIELD: the published control; with k = 0 every offset is alike."""
    encoding, _, _ = make(0)
    q, k, v = inputs(GRIDS["both ways"])
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    grid = GRIDS["both ways"]
    moved = attend(q, k[:, :, order], v[:, :, order], grid, encoding)
    torch.testing.assert_close(moved, attend(q, k, v, grid, encoding))
