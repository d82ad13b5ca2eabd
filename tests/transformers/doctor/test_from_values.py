"""Rotations, visible keys and biases, found from values for those written out in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as masks

from posenc.transformers.doctor import facts

FAR = 2**20
THETA = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
PAIRS = {"half": [(0, 4), (1, 5), (2, 6), (3, 7)], "adjacent": [(0, 1), (2, 3), (4, 5), (6, 7)]}


def rotated(
    x: Tensor, pairs: list[tuple[int, int]], start: int = 0, theta: Tensor = THETA, gain: float = 1
) -> Tensor:
    """Features [heads, tokens, dim] rotated pair by pair, with cos and sin in float32."""
    y = x.clone()
    position = torch.arange(start, start + x.shape[1], dtype=torch.float32)
    for (i, j), t in zip(pairs, theta, strict=True):
        angle = position * t.float()
        cos, sin = gain * angle.cos().double(), gain * angle.sin().double()
        y[..., i] = x[..., i] * cos - x[..., j] * sin
        y[..., j] = x[..., j] * cos + x[..., i] * sin
    return y


def features(dim: int = 8) -> Tensor:
    return torch.randn(3, 9, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pairing", PAIRS)
@pytest.mark.parametrize("gain", [1.0, 1.25])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_rotation_is_found_as_it_was_made(pairing: str, gain: float, sign: int) -> None:
    x, pairs = features(), PAIRS[pairing]
    near = rotated(x, pairs, theta=sign * THETA, gain=gain), x
    far = rotated(x, pairs, FAR, sign * THETA, gain), x
    found = facts.rotation(near, far, FAR)
    assert (found.features, found.first, found.pairing) == (8, 0, pairing)
    assert (found.sign, found.gain, found.varies) == (sign, gain, False)
    assert found.frequencies == pytest.approx(THETA.tolist(), rel=1e-6)
    assert found.base == pytest.approx(10000, rel=1e-4)


def test_features_that_are_left_alone_are_not_counted() -> None:
    x = features(12)
    pairs = [(i + 2, j + 2) for i, j in PAIRS["half"]]
    found = facts.rotation((rotated(x, pairs), x), None, 0)
    assert (found.features, found.first, found.pairing, found.varies) == (8, 2, "half", None)


@pytest.mark.parametrize("change", [{"theta": THETA / 4}, {"gain": 1.5}])
def test_frequencies_and_gains_that_change_with_the_length(change: dict[str, float]) -> None:
    x, pairs = features(), PAIRS["half"]
    far = rotated(x, pairs, FAR, **change), x
    found = facts.rotation((rotated(x, pairs), x), far, FAR)
    assert found.varies is True


def test_stretched_frequencies_have_no_base() -> None:
    x, theta = features(), THETA * torch.tensor([1, 1, 0.5, 0.25])
    found = facts.rotation((rotated(x, PAIRS["half"], theta=theta), x), None, 0)
    assert found.base is None
    divided = facts.rotation((rotated(x, PAIRS["half"], theta=THETA / 4), x), None, 0)
    assert divided.base == pytest.approx(10000, rel=1e-4)
    assert divided.frequencies[0] == pytest.approx(0.25, rel=1e-6)


def test_what_is_no_rotation_is_not_said_to_be_one() -> None:
    x = features()
    assert facts.rotation((x.clone(), x), None, 0) is None
    for other in (x * torch.rand(9, 1), x + torch.rand(9, 8), x.roll(1, -1)):
        found = facts.rotation((other, x), None, 0)
        assert found.pairing is None
        assert found.frequencies is None
    uneven = x.clone()
    uneven[:, 1:, 2] += 1
    found = facts.rotation((uneven, x), None, 0)
    assert found == facts.RotationFacts(features=1, first=2)


def test_rotations_are_alike_up_to_errors_of_float32() -> None:
    one = facts.RotationFacts(features=4, frequencies=(1.0, 0.01), gain=1.0)
    assert one.alike(replace(one, frequencies=(1.0, 0.0100001)))
    assert not one.alike(replace(one, frequencies=(1.0, 0.011)))
    assert not one.alike(replace(one, gain=1.1))
    assert not one.alike(None)


# Visible keys of mask functions, of transformers and others

PADDING = torch.zeros(1, dtype=torch.long)
BLOCKS = torch.tensor([[-1, 0, 0, 1, 1, 1, -1, -1, -1]])

KNOWN: dict[str, tuple[Callable[..., Any], facts.Visible | None]] = {
    "causal": (masks.causal_mask_function, facts.Visible(None, 0)),
    "full": (masks.bidirectional_mask_function, facts.Visible(None, None)),
    "window": (masks.sliding_window_causal_mask_function(4), facts.Visible(3, 0)),
    "both sides": (masks.sliding_window_bidirectional_mask_function(4), facts.Visible(4, 4)),
    "chunk": (masks.chunked_causal_mask_function(16, PADDING), facts.Visible(15, 0, chunk=16)),
    "whole chunk": (lambda b, h, q, k: q // 16 == k // 16, facts.Visible(15, 15, chunk=16)),
    "uneven": (lambda b, h, q, k: (q - k <= 5) & (k - q <= 2), facts.Visible(5, 2)),
    "by blocks": (
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)),
        facts.Visible(None, 0, other=("or blockwise_overlay",)),
    ),
    "first key": (lambda b, h, q, k: (k == 0) | ((q - k < 4) & (k <= q)), None),
    "strides": (lambda b, h, q, k: (q - k) % 2 == 0, None),
    "content": (masks.padding_mask_function(torch.ones(1, 9, dtype=torch.bool)), None),
}


@pytest.mark.parametrize(("function", "expected"), KNOWN.values(), ids=list(KNOWN))
def test_visible_keys(function: Callable[..., Any], expected: facts.Visible | None) -> None:
    assert facts.visible(function) == expected


def test_short_masks() -> None:
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    assert facts.visible_of(causal) == facts.Visible("unknown", 0)
    assert facts.visible_of(torch.zeros(9, 9).masked_fill(~causal[0, 0], -1e9)) == facts.Visible(
        "unknown", 0
    )
    assert facts.visible_of(torch.ones_like(causal)) == facts.Visible("unknown", "unknown")
    assert facts.visible_of(causal.flip(-1)) is None


# Biases told from logits of zero products

OFFSET = torch.arange(9.0) - torch.arange(9.0).unsqueeze(1)  # key − query
HIDDEN = torch.finfo(torch.float32).min
CAUSAL = torch.zeros(9, 9).masked_fill(OFFSET > 0, HIDDEN)
SLOPES = torch.tensor([0.5, 0.125])


@pytest.mark.parametrize("mask", [0.0, CAUSAL])
@pytest.mark.parametrize("form", [OFFSET, torch.arange(9.0).expand(9, 9)])
def test_alibi_by_distance_or_by_key(mask: object, form: torch.Tensor) -> None:
    found = facts.bias_of(SLOPES[:, None, None] * form + mask)
    assert found == facts.Bias("linear", (0.5, 0.125))


def test_other_biases() -> None:
    table = torch.randn(2, 17, generator=torch.Generator().manual_seed(0))
    by_offset = table[:, OFFSET.long() + 8]
    assert facts.bias_of(by_offset + CAUSAL).shape == "by offset"
    assert facts.bias_of(by_offset * torch.rand(9, 1) + CAUSAL).shape == "by position"
    assert facts.bias_of(CAUSAL.expand(2, 9, 9)).shape is None


def test_the_scale_beside_a_mask() -> None:
    products = torch.randn(2, 9, 9, dtype=torch.float64)
    assert facts.factor_of(products, 0.125 * products, CAUSAL.expand(2, 9, 9)) == 0.125
    zero = torch.zeros(2, 9, 9)
    assert facts.factor_of(products, products + OFFSET, zero) is None
    assert facts.factor_of(products, products.tanh(), zero) is None
    assert facts.factor_of(products, products[:1], zero[:1]) is None
