"""ComRoPE against a series of matrix powers, a token and a block at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encoding import apply_rotation
from posenc.encodings.query_key.comrope import ComRope
from posenc.encodings.query_key.rope2d import Rope2d
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import inputs
from tests.encodings.image_grids import IMAGES
from tests.encodings.matrix_loops import turn_blocks_by_loops
from tests.support.exhaustive import in_turn


@pytest.mark.parametrize(
    ("grid", "variant", "block"), in_turn(2, IMAGES, ["linear", "axial"], [2, 4])
)
def test_equals_loops(grid: Grid, variant: str, block: int) -> None:
    q, k, v = (x[:, :2] for x in inputs(grid))
    rope = ComRope(heads=2, head_dim=8, variant=variant, block=block, span=5.0)  # type: ignore[arg-type]

    def algebra(head: int, n: int, at: Tensor) -> Tensor:
        made = rope.matrix[head, n].detach().double()
        if rope.factor is not None:
            amount = at[0] * rope.factor[0, n].item() + at[1] * rope.factor[1, n].item()
        else:
            amount = at[n % 2]
        return (made - made.T) * amount / 5.0

    turned = [
        turn_blocks_by_loops(x, side, block, algebra)
        for x, side in ((q, grid.query), (k, grid.key))
    ]
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, attention_by_loops(*turned, v, grid), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("variant", ["linear", "axial"])
def test_products_depend_on_the_differences_only(variant: str) -> None:
    rope = ComRope(heads=1, head_dim=8, variant=variant, block=4).double()  # type: ignore[arg-type]
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()

    def product(at: list[float], to: list[float]) -> float:
        sides = (Layout.at(torch.tensor([[place]]).double()) for place in (at, to))
        turned, other = rope(q, k, Grid(*sides))
        return (turned * other).sum().item()

    assert product([7, 2], [3, 5]) == pytest.approx(product([107, 32], [103, 35]), rel=1e-6)
    assert product([7, 2], [3, 5]) != pytest.approx(product([3, 5], [7, 2]), rel=1e-3)


def test_axial_pairs_are_axial_rope() -> None:
    """With blocks of 2 and RoPE's frequencies, ComRoPE-AP is axial RoPE, its pairs in turns."""
    rope = ComRope(heads=1, head_dim=8, variant="axial", span=1.0)
    theta = 100.0 ** (-torch.arange(2) / 2)
    with torch.no_grad():
        rope.matrix.zero_()
        rope.matrix[0, :, 1, 0] = theta.repeat_interleave(2)  # blocks: row, column, row, column
    axial = Rope2d(head_dim=8, pairing="adjacent")  # pairs: row, row, column, column
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    q, k = torch.randn(1, 1, 7, 8), torch.randn(1, 1, 7, 8)
    grid = Grid.of(Layout.image(2, 3, prefix=1))
    expected = axial(q[..., order], k[..., order], grid)
    for got, want in zip(rope(q, k, grid), expected, strict=True):
        torch.testing.assert_close(got[..., order], want, atol=1e-5, rtol=1e-5)


def test_initial_values_and_parameters() -> None:
    linear, axial = ComRope(heads=8, head_dim=64), ComRope(heads=8, head_dim=64, variant="axial")
    assert {n: tuple(p.shape) for n, p in linear.named_parameters()} == {
        "matrix": (8, 32, 2, 2),
        "factor": (2, 32),
    }
    assert [n for n, _ in axial.named_parameters()] == ["matrix"]
    assert 0.9 < linear.matrix.std() < 1.1


@pytest.mark.parametrize("block", [2, 4])
def test_blocks_of_two_rotate_by_an_angle(block: int) -> None:
    """Blocks of two have the fused form, whose angles are those of the exponentials."""
    rope = ComRope(heads=2, head_dim=8, block=block, span=3.0)
    grid, q = Grid.of(Layout.image(3, 4, prefix=1)), torch.randn(1, 2, 13, 8)
    found = rope.lower(q, q, grid)
    if block > 2:
        assert found is None
        return
    assert found is not None
    turned = apply_rotation(q, *found.query, found.pairing)
    matrices = rope.rotations(grid.query)
    expected = (matrices @ q.reshape(1, 2, 13, 4, 2, 1)).reshape(q.shape)
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rope(q, q, grid)[1], expected, atol=1e-5, rtol=1e-5)
    one = torch.randn(1, 1, 13, 8)  # keys of one head, which the rotations differ for
    assert rope.lower(q, one, grid) is None
    assert rope(q, one, grid)[1].shape == q.shape
