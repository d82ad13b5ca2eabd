"""LieRE against a series of matrix powers, a token and a block at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.lierope import LieRope
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import inputs
from tests.encodings.image_grids import IMAGES
from tests.encodings.matrix_loops import turn_blocks_by_loops
from tests.support.exhaustive import in_turn


@pytest.mark.parametrize(("grid", "block"), in_turn(1, IMAGES, [2, 4, 8]))
def test_equals_loops(grid: Grid, block: int) -> None:
    q, k, v = (x[:, :2] for x in inputs(grid))
    lie = LieRope(heads=2, head_dim=8, block=block, span=5.0)

    def algebra(head: int, n: int, at: Tensor) -> Tensor:
        made = torch.zeros(block, block, dtype=torch.float64)
        for axis in (0, 1):
            entries = iter(lie.upper[axis, head, n].tolist())
            for row in range(block):
                for column in range(row + 1, block):
                    entry = at[axis] / 5.0 * next(entries)
                    made[row, column] += entry
                    made[column, row] -= entry
        return made

    sides = ((q, grid.query), (k, grid.key))
    turned = [turn_blocks_by_loops(x, side, block, algebra) for x, side in sides]
    got = attend(q, k, v, grid, Encoding(query_key=lie))
    # In float32 the exponent of a place 900 cells away is off by 1e-4 of its thousand radians.
    torch.testing.assert_close(got, attention_by_loops(*turned, v, grid), atol=2e-3, rtol=1e-3)


def test_initial_entries() -> None:
    upper = LieRope(heads=4, head_dim=16).upper
    assert upper.shape == (2, 4, 2, 28)
    assert 0 <= upper.min() < 0.5
    assert 5.5 < upper.max() <= 2 * math.pi


def test_special_tokens_are_told_apart_in_what_is_kept() -> None:
    lie, layout = LieRope(heads=1, head_dim=8), Layout.image(2, 3, prefix=1)
    assert layout.special is not None
    nowhere = replace(layout, extent=None, special=torch.ones_like(layout.special))
    with torch.no_grad():
        for _ in range(2):
            somewhere, still = lie.rotations(layout), lie.rotations(nowhere)
    assert torch.equal(still, torch.eye(8).expand_as(still))
    assert not torch.allclose(somewhere[0, 0, -1, 0], torch.eye(8), atol=0.1)
