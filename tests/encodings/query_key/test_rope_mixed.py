"""RoPE-Mixed against complex multiplication in loops, with frequencies drawn at random."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.rope2d import Rope2d
from posenc.encodings.query_key.rope_mixed import RopeMixed
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import inputs
from tests.encodings.image_grids import IMAGES, rotate_axes_by_loops


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("grid", IMAGES.values(), ids=IMAGES)
def test_equals_loops(grid: Grid, pairing: str) -> None:
    q, k, v = inputs(grid)
    rope = RopeMixed(heads=6, head_dim=8, pairing=pairing)  # type: ignore[arg-type]
    theta = rope.frequencies.tolist()

    def angle(head: int, pair: int, at: list[float]) -> float:
        return at[0] * theta[0][head][pair] + at[1] * theta[1][head][pair]

    how = {"adjacent": pairing == "adjacent"}
    every_k = k.repeat_interleave(2, dim=1)
    turned = (
        rotate_axes_by_loops(q, grid.query, angle, **how),
        rotate_axes_by_loops(every_k, grid.key, angle, **how),
    )
    expected = attention_by_loops(*turned, v.repeat_interleave(2, dim=1), grid)
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_a_pair_by_hand() -> None:
    # With θ = (π/4 a row, π/2 a column) the cell (2, 1) turns by π.
    rope = RopeMixed(heads=1, head_dim=4)
    with torch.no_grad():
        rope.frequencies.copy_(torch.tensor([math.pi / 4, math.pi / 2]).reshape(2, 1, 1))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    turned, _ = rope(x, x, Grid.of(Layout.at(torch.tensor([[[2.0, 1.0]]]))))
    torch.testing.assert_close(turned, -x)


def test_starts_in_random_directions_at_right_angles() -> None:
    torch.manual_seed(0)
    theta = RopeMixed(heads=5, head_dim=16).frequencies
    size = 10.0 ** (-4 * torch.arange(4) / 16)
    torch.testing.assert_close(theta.norm(dim=0), size.repeat(2).expand(5, -1))
    first, second = theta.chunk(2, dim=-1)
    torch.testing.assert_close((first * second).sum(0), torch.zeros(5, 4), atol=1e-6, rtol=0)
    directions = theta[0, :, 0] / theta[:, :, 0].norm(dim=0)
    assert len(directions.unique()) == 5


def test_axial_frequencies_make_it_axial() -> None:
    """RoPE-Mixed contains axial RoPE."""
    mixed, axial = RopeMixed(heads=2, head_dim=8), Rope2d(head_dim=8, base=10.0)
    with torch.no_grad():
        mixed.frequencies.zero_()
        mixed.frequencies[0, :, :2] = mixed.frequencies[1, :, 2:] = 10.0 ** (-torch.arange(2) / 2)
    grid = Grid.of(Layout.image(3, 4, prefix=1))
    q, k = torch.randn(1, 2, 13, 8), torch.randn(1, 2, 13, 8)
    torch.testing.assert_close(mixed(q, k, grid), axial(q, k, grid))
