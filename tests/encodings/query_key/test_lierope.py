"""LieRE against a series of matrix powers, a token and a block at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.lierope import LieRope
from posenc.encodings.query_key.rope_mixed import RopeMixed
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


def test_blocks_of_two_are_rope_mixed() -> None:
    """In one plane all rotations commute: LieRE with b = 2 is RoPE-Mixed."""
    lie = LieRope(heads=3, head_dim=8, block=2, span=1.0)
    mixed = RopeMixed(heads=3, head_dim=8, pairing="adjacent")
    with torch.no_grad():
        mixed.frequencies.copy_(-lie.upper.squeeze(-1))  # above the diagonal is minus the sine
    grid = Grid.of(Layout.image(2, 3, prefix=1))
    q, k = torch.randn(1, 3, 7, 8), torch.randn(1, 3, 7, 8)
    torch.testing.assert_close(lie(q, k, grid), mixed(q, k, grid), atol=1e-4, rtol=1e-4)


def test_lengths_are_kept() -> None:
    x = torch.randn(1, 2, 12, 16)
    turned, _ = LieRope(heads=2, head_dim=16)(x, x, Grid.of(Layout.image(3, 4)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned, x, atol=0.1)


def test_one_row_is_relative() -> None:
    """Along one axis there is one generator, and powers of one rotation commute."""
    lie = LieRope(heads=1, head_dim=8)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(at: float, to: float) -> float:
        sides = (Layout.at(torch.tensor([[[0.0, place]]])) for place in (at, to))
        turned, other = lie(q, k, Grid(*sides))
        return (turned * other).sum().item()

    assert product(2, 5) == pytest.approx(product(7, 10), abs=1e-4)
    assert product(2, 5) != pytest.approx(product(5, 2), abs=1e-3)


def test_initial_entries() -> None:
    upper = LieRope(heads=4, head_dim=16).upper
    assert upper.shape == (2, 4, 2, 28)
    assert 0 <= upper.min() < 0.5
    assert 5.5 < upper.max() <= 2 * math.pi


def test_autocast_keeps_the_angles() -> None:
    lie = LieRope(heads=1, head_dim=8, span=1.0)
    x, grid = torch.randn(1, 1, 9, 8), Grid.of(Layout.image(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        turned = lie(x, x, grid)
    torch.testing.assert_close(turned, lie(x, x, grid))


@pytest.mark.usefixtures("entered")
def test_rotations_are_kept_while_the_matrices_stay() -> None:
    lie = LieRope(heads=2, head_dim=16)
    layout = Layout.image(3, 4, prefix=1)
    grid, q = Grid.of(layout), torch.randn(1, 2, 13, 16)
    with torch.no_grad():
        first, second, third = (lie(q, q, grid)[0] for _ in range(3))
        assert lie.rotations(layout).data_ptr() == lie.rotations(layout).data_ptr()
        assert torch.equal(first, second)
        assert torch.equal(first, third)
        lie.upper.mul_(0.5)
        changed = lie(q, q, grid)[0]
        assert torch.equal(changed, LieRope.forward(_copy(lie), q, q, grid)[0])
        assert not torch.allclose(changed, first)
    turned = lie(q, q, grid)[0]
    assert turned.requires_grad


def _copy(lie: LieRope) -> LieRope:
    twin = LieRope(heads=lie.heads, head_dim=lie.head_dim)
    twin.load_state_dict(lie.state_dict())
    return twin


def test_special_tokens_are_told_apart_in_what_is_kept() -> None:
    lie, layout = LieRope(heads=1, head_dim=8), Layout.image(2, 3, prefix=1)
    assert layout.special is not None
    nowhere = replace(layout, extent=None, special=torch.ones_like(layout.special))
    with torch.no_grad():
        for _ in range(2):
            somewhere, still = lie.rotations(layout), lie.rotations(nowhere)
    assert torch.equal(still, torch.eye(8).expand_as(still))
    assert not torch.allclose(somewhere[0, 0, -1, 0], torch.eye(8), atol=0.1)
