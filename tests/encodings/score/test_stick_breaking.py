"""Stick-breaking against loops that break the stick, the nearest token first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout, attend, explain
from posenc.encodings.score.stick_breaking import StickBreaking
from tests.encodings.grids import GRIDS, inputs

CAUSAL = {name: grid for name, grid in GRIDS.items() if grid.causal}


def by_loops(q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, keep: bool) -> Tensor:
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    visible, group = grid.visible, q.shape[1] // k.shape[1]
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = visible[min(b, len(visible) - 1), 0, i]
        order_k = grid.key.order[min(b, len(grid.key.order) - 1)]
        order_i = grid.query.order[min(b, len(grid.query.order) - 1), i]
        stick = q.new_ones(())
        for j in order_k.argsort(descending=True).tolist():
            if not seen[j] or order_k[j] >= order_i:
                continue
            logit = q[b, h, i] @ k[b, h // group, j] * q.shape[-1] ** -0.5
            share = 1 / (1 + torch.exp(-logit))
            output[b, h, i] += stick * share * v[b, h // group, j]
            stick = stick * (1 - share)
        for j in range(len(order_k)):
            if keep and seen[j] and order_k[j] == order_i:
                output[b, h, i] += stick * v[b, h // group, j]
    return output


@pytest.mark.parametrize("remainder", ["self", "none"])
@pytest.mark.parametrize("grid", CAUSAL.values(), ids=CAUSAL)
def test_equals_loops_gradients_too(grid: Grid, remainder: str) -> None:
    encoding = posenc.create("stick_breaking", remainder=remainder)
    operands = [x.requires_grad_() for x in inputs(grid)]
    got = attend(*operands, grid, encoding)
    expected = by_loops(*operands, grid, keep=remainder == "self")
    torch.testing.assert_close(got, expected)
    if expected.requires_grad:
        found, wanted = (
            torch.autograd.grad(side.sin().sum(), operands, allow_unused=True)
            for side in (got, expected)
        )
        for one, other, x in zip(found, wanted, operands, strict=True):
            torch.testing.assert_close(one, torch.zeros_like(x) if other is None else other)


def test_a_number_by_hand() -> None:
    # Shares 1/3 for the nearest, 1/4 for the one before: 1/3, 1/4 · 2/3 = 1/6, the rest 1/2.
    logits = torch.logit(torch.tensor([1 / 4, 1 / 3, 0.9]))
    q, k = torch.ones(1, 1, 1, 1), logits.view(1, 1, 3, 1)
    grid = Grid(Layout.sequence(1, start=2), Layout.sequence(3), causal=True)
    weights = StickBreaking()(q, k, grid, scale=1.0).exp()
    assert weights.flatten().tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    without = StickBreaking(remainder="none")(q, k, grid, scale=1.0).exp()
    assert without.flatten().tolist() == pytest.approx([1 / 6, 1 / 3, 0.0])


def test_weights_sum_to_one_with_the_remainder_and_to_less_without() -> None:
    grid = GRIDS["causal"]
    q, k, _ = inputs(grid)
    ones = torch.ones_like(k)
    kept = attend(q, k, ones, grid, posenc.create("stick_breaking"))
    torch.testing.assert_close(kept, torch.ones_like(kept))
    lost = attend(q, k, ones, grid, posenc.create("stick_breaking", remainder="none"))
    assert (lost < 1).all()
    assert (lost[:, :, 0] == 0).all()


def test_tokens_of_one_order_share_the_remainder() -> None:
    order = torch.tensor([[0, 1, 2, 2, 3, 3, 3]])
    grid = Grid.of(replace(Layout.sequence(7), start=None, order=order), causal=True)
    q, k, _ = inputs(grid)
    weights = StickBreaking()(q, k.repeat_interleave(2, 1), grid, scale=0.3).exp()
    weights = weights.masked_fill(~grid.visible, 0)
    for alike in (slice(2, 4), slice(4, 7)):
        shares = weights[..., alike, alike]
        torch.testing.assert_close(shares, shares[..., :1].expand_as(shares))
    torch.testing.assert_close(weights[:, :, [0, 1, 3, 6]].sum(-1), torch.ones(2, 6, 4).double())


def test_recent_tokens_go_first() -> None:
    """Of two equal keys the nearer one takes more: order without any position."""
    grid = GRIDS["causal"]
    q, k, _ = inputs(grid)
    same = k[:, :1, :1].expand(-1, 6, 7, -1)
    row = StickBreaking()(q, same, grid, scale=1.0)[:, :, -1, :-1]
    assert (row.diff(dim=-1) > 0).all()


def test_long_products_do_not_vanish() -> None:
    length = 3000
    q = torch.ones(1, 1, 1, 1)
    k = torch.full((1, 1, length, 1), 0.0)
    grid = Grid(Layout.sequence(1, start=length - 1), Layout.sequence(length), causal=True)
    logs = StickBreaking()(q, k.requires_grad_(), grid, scale=1.0)
    assert logs.isfinite().all()
    assert logs[0, 0, 0, 0].item() == pytest.approx(-(length - 1) * 0.69314718, rel=1e-5)
    (gradient,) = torch.autograd.grad(logs.exp().sum(), [k])
    assert gradient.isfinite().all()


def test_no_softmax_is_ever_put_over_it() -> None:
    """Weights of a row sum to less than 1, of which a fused softmax knows nothing."""
    encoding = posenc.create("stick_breaking", remainder="none")
    assert "sdpa" in explain(*inputs(GRIDS["causal"]), GRIDS["causal"], encoding).refusals


def test_joins_with_rope() -> None:
    grid = GRIDS["causal"]
    q, k, v = inputs(grid)
    rope = posenc.create("rope", head_dim=8)
    turned = rope.query_key(q, k, grid)
    torch.testing.assert_close(
        attend(q, k, v, grid, posenc.create("rope+stick_breaking", head_dim=8)),
        attend(*turned, v, grid, posenc.create("stick_breaking")),
    )
