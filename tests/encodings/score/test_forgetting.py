"""Forget gates against loops over the paper's equation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.alibi import geometric_slopes
from posenc.encodings.score.forgetting import Forgetting
from posenc.errors import ArgumentError
from tests.encodings.grids import GRIDS, inputs

CAUSAL = {name: grid for name, grid in GRIDS.items() if grid.causal}
DIM, HEADS = 12, 3


def make() -> Forgetting:
    torch.manual_seed(5)
    forgetting = Forgetting(dim=DIM, heads=HEADS).double()
    torch.nn.init.normal_(forgetting.gate.weight)
    torch.nn.init.normal_(forgetting.gate.bias)
    return forgetting


def observe(forgetting: Forgetting, grid: Grid) -> tuple[Grid, Tensor]:
    """The grid with gates read from random tokens; the tokens of the keys."""
    x = torch.randn(2, grid.key.length, DIM, dtype=torch.float64)
    return replace(grid, key=forgetting.observe(x, grid.key)), x


def by_loops(forgetting: Forgetting, x: Tensor, grid: Grid) -> Tensor:
    """``Σ log f_t`` over the visible keys after j, up to i: one pair and one token at a time."""
    visible, order_q, order_k = grid.visible, grid.query.order, grid.key.order
    output = x.new_zeros(x.shape[0], HEADS, grid.query.length, grid.key.length)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in output.shape)).tolist():
        row_q, row_k = min(b, len(order_q) - 1), min(b, len(order_k) - 1)
        seen = visible[min(b, len(visible) - 1), 0, i]
        for t in range(grid.key.length):
            if seen[j] and seen[t] and order_k[row_k, j] < order_k[row_k, t] <= order_q[row_q, i]:
                logit = forgetting.gate.weight[h] @ x[b, t] + forgetting.gate.bias[h]
                output[b, h, i, j] = output[b, h, i, j] - torch.log1p(torch.exp(-logit))
    return output


@pytest.mark.parametrize("grid", CAUSAL.values(), ids=CAUSAL)
def test_equals_loops_gradients_too(grid: Grid) -> None:
    forgetting = make()
    grid, x = observe(forgetting, grid)
    q = torch.zeros(2, HEADS, grid.query.length, 8, dtype=torch.float64)
    got = forgetting(q, q, grid, scale=1.0).masked_fill(~grid.visible, 0.0)
    expected = by_loops(forgetting, x, grid)
    torch.testing.assert_close(got, expected)
    weights = list(forgetting.parameters())
    found = torch.autograd.grad(got.sin().sum(), weights, allow_unused=True)
    if expected.requires_grad:
        wanted = torch.autograd.grad(expected.sin().sum(), weights)
        torch.testing.assert_close(found, wanted)


def test_a_number_by_hand() -> None:
    # Gates 1/2, 1/4, 1/8 at tokens 0, 1, 2: from 2 back to 0, log(1/4 · 1/8) = -5 log 2.
    forgetting = Forgetting(dim=1, heads=1)
    with torch.no_grad():
        forgetting.gate.weight.fill_(1.0)
    shares = torch.tensor([1 / 2, 1 / 4, 1 / 8])
    layout = forgetting.observe(torch.logit(shares).view(1, 3, 1), Layout.sequence(3))
    zero = torch.zeros(1, 1, 3, 1)
    bias = forgetting(zero, zero, Grid.of(layout, causal=True), scale=1.0)[0, 0]
    assert bias[2].tolist() == pytest.approx([-5 * math.log(2), -3 * math.log(2), 0.0])


def test_constant_gates_are_alibi() -> None:
    slopes = geometric_slopes(HEADS)
    forgetting = make()
    with torch.no_grad():
        forgetting.gate.weight.zero_()
        forgetting.gate.bias.copy_(torch.logit(torch.exp(-torch.as_tensor(slopes).double())))
    grid, _ = observe(forgetting, Grid.of(Layout.sequence(9), causal=True))
    alibi = posenc.create("alibi", heads=HEADS, causal=True)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, HEADS, 9, 4, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        attend(q, q, q, grid, Encoding(score=forgetting)),
        attend(q, q, q, grid, alibi),
        rtol=1e-6,
        atol=1e-6,
    )


def test_dropping_the_oldest_tokens_changes_no_difference() -> None:
    forgetting = make()
    grid, _ = observe(forgetting, Grid.of(Layout.sequence(9), causal=True))
    q = torch.zeros(2, HEADS, 9, 8, dtype=torch.float64)
    short = Grid(grid.query, grid.key.slice(4, 9), causal=True)
    torch.testing.assert_close(
        forgetting(q, q, short, scale=1.0)[:, :, 4:],
        forgetting(q, q, grid, scale=1.0)[:, :, 4:, 4:],
    )


def test_float32_is_exact_after_many_tokens() -> None:
    """Running sums in float32 lose the last gates once thousands have been added."""
    forgetting = Forgetting(dim=1, heads=1)
    with torch.no_grad():
        forgetting.gate.weight.fill_(1.0)
    length = 200_000
    gates = torch.randn(1, length, 1, generator=torch.Generator().manual_seed(1))
    key = forgetting.observe(gates, Layout.sequence(length))
    grid = Grid(Layout.sequence(1, start=length - 1), key, causal=True)
    bias = forgetting(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, length, 1), grid, scale=1.0)
    steps = torch.nn.functional.logsigmoid(gates.double()).flatten()
    assert bias[0, 0, 0, -3].item() == pytest.approx((steps[-1] + steps[-2]).item(), rel=1e-6)
    (lowered,) = forgetting.lower(torch.zeros(1, 1, 1, 1), gates.unsqueeze(1), grid, scale=1.0)
    near = lowered.row[0, 0, 0] + lowered.column[0, 0, -3]
    assert near.item() == pytest.approx((steps[-1] + steps[-2]).item(), rel=1e-6)


def test_autocast_reads_gates_in_float32() -> None:
    forgetting = make().float()
    x = torch.randn(1, 6, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = forgetting.observe(x, Layout.sequence(6)).signal
    torch.testing.assert_close(mixed, forgetting.observe(x, Layout.sequence(6)).signal)


def test_tokens_must_have_been_read() -> None:
    q, k, v = inputs(GRIDS["causal"])
    with pytest.raises(ArgumentError, match="observe"):
        attend(q, k, v, GRIDS["causal"], posenc.create("forgetting", dim=48, heads=6))


def test_documents_of_a_regular_layout_in_any_sequence() -> None:
    """A layout may be regular and have documents whose numbers fall."""
    forgetting = make()
    falling = replace(Layout.sequence(7), document=torch.tensor([[5, 5, 5, 2, 2, 2, 2]]))
    rising = replace(falling, document=falling.document.neg())
    grid, _ = observe(forgetting, Grid.of(falling, causal=True))
    other = Grid(rising, replace(rising, signal=grid.key.signal), causal=True)
    q = torch.zeros(2, HEADS, 7, 8, dtype=torch.float64)
    got, expected = (forgetting(q, q, each, scale=1.0) for each in (grid, other))
    seen = grid.visible.expand_as(got)
    torch.testing.assert_close(got[seen], expected[seen])


def test_holes_of_padding_forget_nothing() -> None:
    forgetting = make()
    holed = replace(Layout.sequence(5), valid=torch.tensor([[True, True, False, True, True]]))
    grid, x = observe(forgetting, Grid.of(holed, causal=True))
    real = [0, 1, 3, 4]
    whole = forgetting(x[:, None, :], x[:, None, :], grid, scale=1.0)
    key = forgetting.observe(x[:, real], Layout.sequence(4))
    alone = forgetting(x[:, None, :4], x[:, None, :4], Grid(key, key, causal=True), scale=1.0)
    torch.testing.assert_close(whole[:, :, real][..., real], alone)


def test_what_padding_holds_does_not_reach_the_structured_form() -> None:
    """A backend adds row and column before it hides a pair: NaN would survive the hiding."""
    forgetting = make()
    layout = Layout.padded([3, 5])
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    x[0, 3:] = torch.nan
    seen = forgetting.observe(x, layout)
    q = torch.zeros(2, HEADS, 5, 8, dtype=torch.float64)
    (lowered,) = forgetting.lower(q, q, Grid.of(seen, causal=True), scale=1.0)
    assert lowered.row.isfinite().all()
    assert lowered.column.isfinite().all()
