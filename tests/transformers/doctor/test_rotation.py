"""Rotations found from queries before and after them, for rotations written out in full."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc.transformers.doctor.facts import RotationFacts, rotation

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
    found = rotation(near, far, FAR)
    assert found is not None
    assert (found.features, found.first, found.pairing) == (8, 0, pairing)
    assert (found.sign, found.gain, found.varies) == (sign, gain, False)
    assert found.frequencies == pytest.approx(THETA.tolist(), rel=1e-6)
    assert found.base == pytest.approx(10000, rel=1e-4)


def test_features_that_are_left_alone_are_not_counted() -> None:
    x = features(12)
    pairs = [(i + 2, j + 2) for i, j in PAIRS["half"]]
    found = rotation((rotated(x, pairs), x), None, 0)
    assert found is not None
    assert (found.features, found.first, found.pairing, found.varies) == (8, 2, "half", None)


@pytest.mark.parametrize("change", [{"theta": THETA / 4}, {"gain": 1.5}])
def test_frequencies_and_gains_that_change_with_the_length(change: dict[str, float]) -> None:
    x, pairs = features(), PAIRS["half"]
    far = rotated(x, pairs, FAR, **change), x  # type: ignore[arg-type]
    found = rotation((rotated(x, pairs), x), far, FAR)
    assert found is not None
    assert found.varies is True


def test_stretched_frequencies_have_no_base() -> None:
    x, theta = features(), THETA * torch.tensor([1, 1, 0.5, 0.25])
    found = rotation((rotated(x, PAIRS["half"], theta=theta), x), None, 0)
    assert found is not None
    assert found.base is None
    divided = rotation((rotated(x, PAIRS["half"], theta=THETA / 4), x), None, 0)
    assert divided is not None
    assert divided.base == pytest.approx(10000, rel=1e-4)
    assert divided.frequencies is not None
    assert divided.frequencies[0] == pytest.approx(0.25, rel=1e-6)


def test_what_is_no_rotation_is_not_said_to_be_one() -> None:
    x = features()
    assert rotation((x.clone(), x), None, 0) is None
    for other in (x * torch.rand(9, 1), x + torch.rand(9, 8), x.roll(1, -1)):
        found = rotation((other, x), None, 0)
        assert found is not None
        assert found.pairing is None
        assert found.frequencies is None
    uneven = x.clone()
    uneven[:, 1:, 2] += 1
    found = rotation((uneven, x), None, 0)
    assert found == RotationFacts(features=1, first=2)


def test_rotations_are_alike_up_to_errors_of_float32() -> None:
    one = RotationFacts(features=4, frequencies=(1.0, 0.01), gain=1.0)
    assert one.alike(replace(one, frequencies=(1.0, 0.0100001)))
    assert not one.alike(replace(one, frequencies=(1.0, 0.011)))
    assert not one.alike(replace(one, gain=1.1))
    assert not one.alike(None)
