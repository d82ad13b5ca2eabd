"""NoPE: plain attention, and what a causal mask gives away."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import Encoding, Grid, attend
from posenc.models import Decoder, DecoderConfig
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid) -> None:
    q, k, v = inputs(grid)
    expected = attention_by_loops(q, k, v, grid)
    got = attend(q, k, v, grid, posenc.create("nope"), backend="reference")
    torch.testing.assert_close(got, expected)


def test_products_by_hand() -> None:
    # Values 0.5, 0.6, 0.7: without positions the table of products is symmetric.
    x = torch.tensor([0.5, 0.6, 0.7])
    table = torch.outer(x, x)
    assert table[0, 1].item() == table[1, 0].item() == pytest.approx(0.30)
    placed = torch.outer(x, x + torch.arange(3))
    rows = [[0.25, 0.80, 1.35], [0.30, 0.96, 1.62], [0.35, 1.12, 1.89]]
    torch.testing.assert_close(placed, torch.tensor(rows))


def test_without_positions_attention_is_permutation_equivariant() -> None:
    q, k, v = inputs(GRIDS["both ways"])
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    grid = GRIDS["both ways"]
    plain = attend(q, k, v, grid, Encoding())
    moved = attend(q[:, :, order], k[:, :, order], v[:, :, order], grid, Encoding())
    torch.testing.assert_close(moved, plain[:, :, order])
    rope = posenc.create("rope", head_dim=8)
    moved = attend(q[:, :, order], k[:, :, order], v[:, :, order], grid, rope)
    assert not torch.allclose(moved, attend(q, k, v, grid, rope)[:, :, order], atol=1e-3)


def test_causal_nope_of_two_layers_tells_order() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=9, dim=16, layers=2, heads=2, encoding="nope")
    model = Decoder(config).eval()
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    ends = model(tokens)[:, -1]
    assert not torch.allclose(ends[0], ends[1], atol=1e-4)
    one = Decoder(DecoderConfig(vocabulary=9, dim=16, layers=1, heads=2, encoding="nope")).eval()
    ends = one(tokens)[:, -1]
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-5)
