"""Sinusoids against loops, Whisper's table, and numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.whisper.modeling_whisper import sinusoids

from posenc import Layout
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.errors import ArgumentError
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


def test_concatenated_is_a_permutation() -> None:
    positions = torch.tensor(POSITIONS)
    interleaved = Sinusoidal(dim=7).table(positions)
    concatenated = Sinusoidal(dim=7, arrangement="concatenated").table(positions)
    torch.testing.assert_close(concatenated[:, :4], interleaved[:, 0::2])
    torch.testing.assert_close(concatenated[:, 4:], interleaved[:, 1::2])


def test_equals_whisper() -> None:
    """FIELD: Whisper divides by half the width less one."""
    ours = Sinusoidal(dim=64, arrangement="whisper").table(torch.arange(1500.0))
    torch.testing.assert_close(ours, sinusoids(1500, 64), atol=2e-4, rtol=0)
    other = Sinusoidal(dim=64, arrangement="concatenated").table(torch.arange(1500.0))
    assert not torch.allclose(other, sinusoids(1500, 64), atol=0.1)


def test_a_step_is_a_rotation_that_does_not_depend_on_where() -> None:
    table = Sinusoidal(dim=8).table(torch.arange(20.0, dtype=torch.float64))
    for t in range(4):
        angle = 3 * 10000.0 ** (-2 * t / 8)
        turn = torch.tensor(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]],
            dtype=torch.float64,
        )
        pair = table[:, 2 * t : 2 * t + 2]
        torch.testing.assert_close(pair[:17] @ turn.T, pair[3:])


def test_added_or_multiplied() -> None:
    x, layout = torch.randn(2, 5, 6), Layout.sequence(5, start=2)
    table = Sinusoidal(dim=6).table(torch.arange(2.0, 7.0))
    torch.testing.assert_close(Sinusoidal(dim=6)(x, layout), x + table)
    torch.testing.assert_close(Sinusoidal(dim=6, fusion="multiply")(x, layout), x * table)


def test_positions_stay_apart_in_bfloat16() -> None:
    encoding = Sinusoidal(dim=64).bfloat16()
    out = encoding(torch.zeros(1, 3, 64, dtype=torch.bfloat16), Layout.sequence(3, start=4000))
    assert out.dtype == torch.bfloat16
    exact = Sinusoidal(dim=64).table(torch.arange(4000.0, 4003.0))
    assert (out[0].float() - exact).abs().max().item() < 0.01


def test_another_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match="width 8"):
        Sinusoidal(dim=8)(torch.zeros(1, 2, 6), Layout.sequence(2))
