"""Biases told from logits of zero products."""

from __future__ import annotations

import pytest
import torch

from posenc.transformers.doctor.facts import Bias, bias_of, factor_of

OFFSET = torch.arange(9.0) - torch.arange(9.0).unsqueeze(1)  # key − query
HIDDEN = torch.finfo(torch.float32).min
CAUSAL = torch.zeros(9, 9).masked_fill(OFFSET > 0, HIDDEN)
SLOPES = torch.tensor([0.5, 0.125])


@pytest.mark.parametrize("mask", [0.0, CAUSAL])
@pytest.mark.parametrize("form", [OFFSET, torch.arange(9.0).expand(9, 9)])
def test_alibi_by_distance_or_by_key(mask: object, form: torch.Tensor) -> None:
    found = bias_of(SLOPES[:, None, None] * form + mask)
    assert found == Bias("linear", (0.5, 0.125))


def test_other_biases() -> None:
    table = torch.randn(2, 17, generator=torch.Generator().manual_seed(0))
    by_offset = table[:, OFFSET.long() + 8]
    assert bias_of(by_offset + CAUSAL).shape == "by offset"
    assert bias_of(by_offset * torch.rand(9, 1) + CAUSAL).shape == "by position"
    assert bias_of(CAUSAL.expand(2, 9, 9)).shape is None


def test_the_scale_beside_a_mask() -> None:
    products = torch.randn(2, 9, 9, dtype=torch.float64)
    assert factor_of(products, 0.125 * products, CAUSAL.expand(2, 9, 9)) == 0.125
    zero = torch.zeros(2, 9, 9)
    assert factor_of(products, products + OFFSET, zero) is None
    assert factor_of(products, products.tanh(), zero) is None
    assert factor_of(products, products[:1], zero[:1]) is None
