"""Sinusoids against loops, Whisper's table, and numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.whisper.modeling_whisper import sinusoids

from posenc import Layout
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.testing.oracles import sinusoid_by_loops

POSITIONS = [0.0, 1.0, 0.5, 63.0, 5000.0, -3.25]


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_equals_loops(dim: int, base: float) -> None:
    table = Sinusoidal(dim=dim, base=base).table(torch.tensor(POSITIONS, dtype=torch.float64))
    expected = [sinusoid_by_loops(position, dim, base=base) for position in POSITIONS]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))


def test_numbers_by_hand() -> None:
    # C = 4: frequencies 1 and 1/100.
    row = Sinusoidal(dim=4).table(torch.tensor([2.0]))[0].tolist()
    expected = [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]
    assert row == pytest.approx(expected, abs=1e-6)


def test_equals_whisper() -> None:
    """FIELD: Whisper divides by half the width less one."""
    ours = Sinusoidal(dim=64, arrangement="whisper").table(torch.arange(1500.0))
    torch.testing.assert_close(ours, sinusoids(1500, 64), atol=2e-4, rtol=0)
    other = Sinusoidal(dim=64, arrangement="concatenated").table(torch.arange(1500.0))
    assert not torch.allclose(other, sinusoids(1500, 64), atol=0.1)


def test_added_or_multiplied() -> None:
    x, layout = torch.randn(2, 5, 6), Layout.sequence(5, start=2)
    table = Sinusoidal(dim=6).table(torch.arange(2.0, 7.0))
    torch.testing.assert_close(Sinusoidal(dim=6)(x, layout), x + table)
    torch.testing.assert_close(Sinusoidal(dim=6, fusion="multiply")(x, layout), x * table)
