"""Gaussian Fourier features against loops, and their kernel."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.gaussian_fourier import GaussianFourier


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_equals_loops(axes: int) -> None:
    encoding = GaussianFourier(dim=6, axes=axes, sigma=3.0, max_length=20)
    numbers = encoding.drawn.view(torch.float32).double() * 3.0 / 20
    positions = 15 * torch.randn(2, 4, axes, dtype=torch.float64)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    got = encoding(x, Layout.at(positions))
    for b in range(2):
        for i in range(4):
            for t in range(3):
                turns = sum(float(numbers[t, a] * positions[b, i, a]) for a in range(axes))
                for place, wave in ((t, math.cos), (t + 3, math.sin)):
                    added = (got[b, i, place] - x[b, i, place]).item()
                    assert added == pytest.approx(wave(2 * math.pi * turns), abs=1e-9)


def test_worked_by_hand() -> None:
    """A draw of 0.5 with σ = 2 in 8 tokens is an eighth of a turn a token."""
    encoding = GaussianFourier(dim=2, sigma=2.0, max_length=8)
    encoding.drawn.copy_(torch.tensor([[0.5]]).view(torch.int32))
    got = encoding(torch.zeros(1, 3, 2), Layout.sequence(3)).flatten().tolist()
    half = math.sqrt(0.5)
    assert got == pytest.approx([1, 0, half, half, 0, 1], abs=1e-6)


def test_products_are_a_gaussian_kernel() -> None:
    torch.manual_seed(0)
    encoding = GaussianFourier(dim=40000, axes=2, sigma=1.0, max_length=10)
    places = torch.tensor([[[0.0, 0.0], [0.6, 0.8], [1.0, 0.0], [0.0, 3.0]]])
    vectors = encoding(torch.zeros(1, 4, 40000), Layout.at(places))[0]
    products = (vectors @ vectors[0] / 20000).tolist()
    expected = [math.exp(-2 * math.pi**2 * (d / 10) ** 2) for d in (0, 1, 1, 3)]
    assert products == pytest.approx(expected, abs=0.02)


def test_draws_outlive_a_narrow_dtype() -> None:
    """Frequencies in bfloat16 would be off by radians far out; they are not cast with the rest."""
    encoding = GaussianFourier(dim=16)
    narrow = copy.deepcopy(encoding).to(torch.bfloat16)
    x, layout = torch.zeros(1, 5, 16), Layout.sequence(5, start=5000)
    torch.testing.assert_close(narrow(x, layout), encoding(x, layout), rtol=0, atol=0)
