"""Visible keys of transformers' mask functions, and of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from posenc.transformers.doctor.facts import Visible, visible, visible_of

PADDING = torch.zeros(1, dtype=torch.long)
BLOCKS = torch.tensor([[-1, 0, 0, 1, 1, 1, -1, -1, -1]])

KNOWN: dict[str, tuple[Callable[..., Any], Visible | None]] = {
    "causal": (masks.causal_mask_function, Visible(None, 0)),
    "full": (masks.bidirectional_mask_function, Visible(None, None)),
    "window": (masks.sliding_window_causal_mask_function(4), Visible(3, 0)),
    "both sides": (masks.sliding_window_bidirectional_mask_function(4), Visible(4, 4)),
    "chunk": (masks.chunked_causal_mask_function(16, PADDING), Visible(15, 0, chunk=16)),
    "whole chunk": (lambda b, h, q, k: q // 16 == k // 16, Visible(15, 15, chunk=16)),
    "uneven": (lambda b, h, q, k: (q - k <= 5) & (k - q <= 2), Visible(5, 2)),
    "by blocks": (
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)),
        Visible(None, 0, other=("or blockwise_overlay",)),
    ),
    "first key": (lambda b, h, q, k: (k == 0) | ((q - k < 4) & (k <= q)), None),
    "strides": (lambda b, h, q, k: (q - k) % 2 == 0, None),
    "content": (masks.padding_mask_function(torch.ones(1, 9, dtype=torch.bool)), None),
}


@pytest.mark.parametrize(("function", "expected"), KNOWN.values(), ids=list(KNOWN))
def test_visible_keys(function: Callable[..., Any], expected: Visible | None) -> None:
    assert visible(function) == expected


def test_short_masks() -> None:
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    assert visible_of(causal) == Visible("unknown", 0)
    assert visible_of(torch.zeros(9, 9).masked_fill(~causal[0, 0], -1e9)) == Visible("unknown", 0)
    assert visible_of(torch.ones_like(causal)) == Visible("unknown", "unknown")
    assert visible_of(causal.flip(-1)) is None
