"""Label smoothing by its definition, over the tokens that count; and masking."""

from __future__ import annotations

import pytest
import torch

from posenc.errors import ArgumentError
from posenc.lab.training.objectives import mask_tokens, token_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_cross_entropy_with_a_smoothed_target(smoothing: float) -> None:
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    valid = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    expected, logp = 0.0, logits.log_softmax(-1)
    for row in range(2):
        for place in range(5):
            if valid[row, place]:
                for token in range(7):
                    wanted = smoothing / 7 + (1 - smoothing) * (token == targets[row, place])
                    expected -= float(wanted * logp[row, place, token])
    got = token_loss(logits, targets, valid=valid, smoothing=smoothing)
    assert float(got) == pytest.approx(expected / 7, rel=1e-5)


def test_what_does_not_count_has_no_gradient() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    valid = torch.tensor([[True, False, True]])
    token_loss(logits, torch.tensor([[0, 1, 2]]), valid=valid, smoothing=0.1).backward()
    assert logits.grad.abs().sum(-1).gt(0).tolist() == valid.tolist()
    none = token_loss(logits, torch.tensor([[0, 1, 2]]), valid=torch.zeros(1, 3).bool())
    assert none.item() == 0.0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="smoothing"):
        token_loss(torch.randn(1, 2, 3), torch.zeros(1, 2).long(), smoothing=1.0)
    with pytest.raises(ArgumentError, match="targets"):
        token_loss(torch.randn(1, 2, 3), torch.zeros(1, 3).long())
    with pytest.raises(ArgumentError, match="rate"):
        mask_tokens(torch.zeros(1, 2).long(), mask_token=0, vocabulary=3, rate=0.0)


def test_eight_of_ten_chosen_tokens_are_hidden() -> None:
    tokens = torch.randint(1000, (200, 500), generator=torch.Generator().manual_seed(0))
    given = {"mask_token": 1000, "vocabulary": 1000, "eligible": torch.arange(500)[None] < 400}
    masked, again = (
        mask_tokens(tokens, generator=torch.Generator().manual_seed(1), **given) for _ in range(2)
    )
    chosen = masked.chosen
    assert not chosen[:, 400:].any()
    assert float(chosen[:, :400].float().mean()) == pytest.approx(0.15, abs=0.005)
    assert torch.equal(masked.inputs[~chosen], tokens[~chosen])
    hidden = masked.inputs[chosen] == 1000
    same = masked.inputs[chosen] == tokens[chosen]
    assert float(hidden.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(same.float().mean()) == pytest.approx(0.1, abs=0.02)
    assert torch.equal(again.inputs, masked.inputs)
