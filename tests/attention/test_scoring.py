"""The softmax that rows without a visible key pass through."""

from __future__ import annotations

import torch

from posenc.attention.scoring import masked_softmax


def test_hidden_keys_get_nothing_and_the_rest_sums_to_one() -> None:
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    visible = torch.rand(2, 1, 4, 5) > 0.4
    weights = masked_softmax(logits, visible)
    assert (weights.masked_select(~visible) == 0).all()
    seen = visible.any(-1).expand(2, 3, 4)
    torch.testing.assert_close(weights.sum(-1), seen.double())


def test_empty_rows_are_zero_with_zero_gradients() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    visible = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    weights = masked_softmax(logits, visible)
    (weights * torch.arange(4)).sum().backward()
    assert (weights[1] == 0).all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[0] != 0).any()


def test_large_logits_do_not_overflow() -> None:
    weights = masked_softmax(torch.tensor([[1e30, -1e30, 1e30]]), torch.ones(1, 3).bool())
    assert weights.tolist() == [[0.5, 0.0, 0.5]]
