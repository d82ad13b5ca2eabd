"""CoPE against loops over the paper's equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.cope import Cope
from tests.encodings.grids import GRIDS, inputs

CAUSAL = {name: grid for name, grid in GRIDS.items() if grid.causal}
SCALE = 0.5


def make(max_count: int = 4, width: int = 8) -> Cope:
    torch.manual_seed(4)
    cope = Cope(head_dim=width, max_count=max_count).double()
    torch.nn.init.normal_(cope.rows)
    return cope


def by_loops(cope: Cope, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """One pair at a time; keys are found by their order, wherever they are in the tensor."""
    order_q, order_k, visible = grid.query.order, grid.key.order, grid.visible
    top = cope.rows.shape[0] - 1
    output = q.new_zeros(*q.shape[:3], k.shape[2])
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in output.shape)).tolist():
        row_q, row_k = min(b, len(order_q) - 1), min(b, len(order_k) - 1)
        seen = visible[min(b, len(visible) - 1), 0, i]
        if not seen[j]:
            continue
        count = q.new_zeros(())
        for t in range(k.shape[2]):
            between = order_k[row_k, j] <= order_k[row_k, t] <= order_q[row_q, i]
            if seen[t] and between:
                count = count + 1 / (1 + torch.exp(-SCALE * (q[b, h, i] @ k[b, h, t])))
        if count >= top:
            output[b, h, i, j] = q[b, h, i] @ cope.rows[top]
            continue
        low = math.floor(count.item())
        share = count - low
        row = (1 - share) * cope.rows[low] + share * cope.rows[low + 1]
        output[b, h, i, j] = q[b, h, i] @ row
    return output


@pytest.mark.parametrize("max_count", [2, 4, 40])
@pytest.mark.parametrize("grid", CAUSAL.values(), ids=CAUSAL)
def test_equals_loops_gradients_too(grid: Grid, max_count: int) -> None:
    cope = make(max_count)
    q, k, _ = inputs(grid, heads=2)
    k = k.repeat_interleave(2, dim=1)
    q.requires_grad_()
    k.requires_grad_()
    seen = grid.visible
    got = cope(q, k, grid, scale=SCALE).masked_fill(~seen, 0.0)
    expected = by_loops(cope, q, k, grid)
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), [q, k, cope.rows], allow_unused=True)
    found = torch.autograd.grad(got.sin().sum(), [q, k, cope.rows])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


def test_a_number_by_hand() -> None:
    # Width 1, q = 1, k = 0: every gate is 1/2. From the second token back to the first it counts
    # 1/2 + 1/2 = 1, to itself 1/2. The table is 0, 10, 30: e(1) = 10, e(1/2) = 5.
    cope = Cope(head_dim=1, max_count=3)
    with torch.no_grad():
        cope.rows.copy_(torch.tensor([[0.0], [10.0], [30.0]]))
    one, zero = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    score = cope(one, zero, Grid.of(Layout.sequence(2), causal=True), scale=1.0)
    assert score[0, 0, 1].tolist() == [10.0, 5.0]
    assert score[0, 0, 0, 0].item() == 5.0


def test_with_all_gates_one_it_is_clipped_distance() -> None:
    """FIELD section 5."""
    cope = make(max_count=5)
    q = torch.randn(1, 2, 9, 8, dtype=torch.float64).abs()
    k = torch.full_like(q, 1e4)
    grid = Grid.of(Layout.sequence(9), causal=True)
    distance = (-grid.offset[0, ..., 0] + 1).clamp(0, 4).long()
    expected = torch.einsum("bhqd,qkd->bhqk", q, cope.rows[distance])
    got = cope(q, k, grid, scale=1.0)
    torch.testing.assert_close(got[..., grid.visible[0, 0]], expected[..., grid.visible[0, 0]])


def test_with_all_gates_closed_nothing_is_counted() -> None:
    cope = make()
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64).abs()
    grid = Grid.of(Layout.sequence(5), causal=True)
    got = cope(q, torch.full_like(q, -1e4), grid, scale=1.0)
    torch.testing.assert_close(got, (q @ cope.rows[0]).unsqueeze(-1).expand_as(got))


def test_half_precision_counts_past_256() -> None:
    """bfloat16 cannot count beyond 256; the sum is taken in float32."""
    cope = Cope(head_dim=1, max_count=2048)
    with torch.no_grad():
        cope.rows.copy_(torch.arange(2048.0).unsqueeze(1) / 2048)
    q = torch.ones(1, 1, 1, 1)
    k = torch.full((1, 1, 1000, 1), 100.0)
    grid = Grid(Layout.sequence(1, start=999), Layout.sequence(1000), causal=True)
    narrow = attend(q.bfloat16(), k.bfloat16(), k.bfloat16(), grid, Encoding(score=cope.bfloat16()))
    assert narrow.isfinite().all()
    score = cope(q, k, grid, scale=1.0)
    assert score[0, 0, 0, 0].item() == pytest.approx(1000 / 2048, rel=4e-3)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_queries_that_overflowed_give_nan(backend: str, number: float) -> None:
    """A scaler of gradients skips such a step; an index out of bounds would end the training."""
    cope, (q, k, v) = Cope(head_dim=8), inputs(GRIDS["causal"])
    torch.nn.init.normal_(cope.rows)
    clean = attend(q, k, v, GRIDS["causal"], Encoding(score=cope), backend=backend)
    q = q.clone()
    q[:, :, 1, 0] = number
    output = attend(q, k, v, GRIDS["causal"], Encoding(score=cope), backend=backend)
    assert output[:, :, 1].isnan().any()
    others = torch.arange(q.shape[2]) != 1
    torch.testing.assert_close(output[:, :, others], clean[:, :, others])
