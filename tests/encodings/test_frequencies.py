"""Angles at positions of any size."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from posenc.encodings.common.precision import TURN, angles_at, geometric_frequencies, wider
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import create

FAR = [100, 2**20, 2**24 + 1, 2**40 + 12345, 2**53 - 7]


def exact_angles(position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """The frequencies in turns, as float64 has them, times an integer: in fractions."""
    turns = [Fraction(each) * position for each in (frequencies / TURN).tolist()]
    return torch.tensor([float(turn - round(turn)) * TURN for turn in turns], dtype=torch.float64)


@pytest.mark.parametrize("position", FAR)
def test_angles_are_exact_modulo_a_turn(position: int) -> None:
    layout = Layout.sequence(1, position)
    frequencies = geometric_frequencies(32, 64, 10000.0, like=wider(layout.positions))
    got = angles_at(layout.positions[0], frequencies)[0]
    off = torch.sin((got.double() - exact_angles(position, frequencies)) / 2).abs().max()
    assert off < (2e-7 if got.dtype == torch.float32 else 1e-15)


@pytest.mark.parametrize("position", FAR[:4])
def test_encodings_are_those_of_the_true_angles(position: int) -> None:
    """Frequencies are rounded to 2^-53 of themselves, which is what they are off in the end."""
    layout = Layout.sequence(1, position)
    allowed = 5e-7 + position * 2**-53
    theta = geometric_frequencies(32, 64, 10000.0, like=torch.zeros((), dtype=torch.float64))
    angles = exact_angles(position, theta)
    table = create("sinusoidal", dim=64).embed(torch.zeros(1, 1, 64), layout)[0, 0]
    assert (table[0::2] - angles.sin()).abs().max() < allowed
    rope = create("rope", head_dim=64).query_key
    assert rope is not None
    q = torch.ones(1, 1, 1, 64)
    turned = rope(q, q, Grid.of(layout))[0][0, 0, 0]
    assert (turned[:32] - (angles.cos() - angles.sin())).abs().max() < 2 * allowed


def test_angles_have_derivatives_and_no_nan() -> None:
    positions = torch.tensor([[1.5], [-2.25], [70.25]], dtype=torch.float64, requires_grad=True)
    frequencies = torch.tensor([1.0, 0.3, 1e-4], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda p, f: angles_at(p, f).sin(), (positions, frequencies))
    single = positions.detach().float().requires_grad_()
    angles_at(single, frequencies).sum().backward()
    assert torch.allclose(single.grad[0], frequencies.sum().float())  # type: ignore[index]
    huge = torch.tensor([1e300, 3e38], dtype=torch.float64)
    assert angles_at(huge, torch.ones(1)).isfinite().all()
