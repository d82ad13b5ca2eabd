"""DAPE against loops over the paper's equation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.dape import Dape
from tests.encodings.grids import GRIDS, inputs

SCALE = 0.5


def make(bias: str = "kerple", heads: int = 3) -> Dape:
    torch.manual_seed(2)
    return Dape(heads=heads, bias=bias, hidden=5).double()  # type: ignore[arg-type]


def kerple_by_hand(dape: Dape, h: int, distance: float) -> Tensor:
    r1, r2 = dape.corrected.raw_scale[h].exp(), dape.corrected.raw_shape[h].exp()
    return -r1 * torch.log(1 + r2 * abs(distance))


def by_loops(dape: Dape, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    offset, heads = grid.offset[..., 0], q.shape[1]
    pairs = torch.cartesian_prod(*(torch.arange(n) for n in (len(q), q.shape[2], k.shape[2])))
    rows = []
    for b, i, j in pairs.tolist():
        distance = float(offset[min(b, len(offset) - 1), i, j])
        bias = torch.stack([kerple_by_hand(dape, h, distance) for h in range(heads)])
        logits = torch.stack([q[b, h, i] @ k[b, h, j] * SCALE for h in range(heads)])
        hidden = dape.input.weight @ torch.cat([logits, bias]) + dape.input.bias
        hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
        rows.append(bias + dape.output.weight @ hidden + dape.output.bias)
    return torch.stack(rows).view(len(q), q.shape[2], k.shape[2], heads).permute(0, 3, 1, 2)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops_gradients_too(grid: Grid) -> None:
    dape = make()
    q, k, _ = inputs(grid, heads=6)
    q, k = q[:, :3].clone().requires_grad_(), k.requires_grad_()
    got, expected = dape(q, k, grid, scale=SCALE), by_loops(dape, q, k, grid)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # of float32 positions
    close(got, expected)
    learned = [q, k, *dape.parameters()]
    found, wanted = (torch.autograd.grad(side.sin().sum(), learned) for side in (got, expected))
    close(found, wanted)


def test_a_number_by_hand() -> None:
    # One head, ALiBi's slope 2^-8 at distance 256: B = -1. A = 1 · 3. Hidden: 2·3 + 1·(-1) = 5
    # and -(3) = -3, which leaks as -0.03; out 10·5 + 100·(-0.03) = 47; with B, 46.
    dape = Dape(heads=1, bias="alibi", hidden=2)
    with torch.no_grad():
        dape.input.weight.copy_(torch.tensor([[2.0, 1.0], [-1.0, 0.0]]))
        dape.output.weight.copy_(torch.tensor([[10.0, 100.0]]))
        dape.input.bias.zero_()
        dape.output.bias.zero_()
    grid = Grid(Layout.sequence(1, start=256), Layout.sequence(1), causal=True)
    one = torch.ones(1, 1, 1, 1)
    assert dape(one, 3 * one, grid, scale=1.0).item() == pytest.approx(46.0)


@pytest.mark.parametrize("bias", ["alibi", "fire", "kerple"])
def test_with_a_silent_network_it_is_the_bias(bias: str) -> None:
    dape = make(bias, heads=6)
    torch.nn.init.zeros_(dape.output.weight)
    torch.nn.init.zeros_(dape.output.bias)
    grid = GRIDS["causal"]
    q, k, v = inputs(grid)
    torch.testing.assert_close(
        attend(q, k, v, grid, Encoding(score=dape)),
        attend(q, k, v, grid, Encoding(score=dape.corrected)),
        rtol=1e-6,
        atol=1e-6,
    )


def test_the_same_distance_may_weigh_differently() -> None:
    """A result that a bias of the offset alone cannot give."""
    dape = make()
    grid = Grid(Layout.sequence(1, start=1), Layout.sequence(1), causal=True)
    one = torch.ones(1, 3, 1, 2, dtype=torch.float64)
    assert not torch.allclose(dape(one, one, grid, scale=1.0), dape(one, -one, grid, scale=1.0))
