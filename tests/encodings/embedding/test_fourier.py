"""Learned Fourier features against loops, on any number of axes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc import Layout
from posenc.encodings.embedding.fourier import Fourier, waves
from tests.encodings.grids import agree_with_gradients


def loops(encoding: Fourier, position: Tensor) -> Tensor:
    """The paper's algorithm for one position, a number at a time."""
    count, axes = encoding.frequencies.shape
    phases = [
        sum(encoding.frequencies[t, a] * position[a] for a in range(axes)) for t in range(count)
    ]
    features = [torch.cos(torch.as_tensor(phase)) for phase in phases]
    features += [torch.sin(torch.as_tensor(phase)) for phase in phases]
    r = torch.stack(features) / math.sqrt(2 * count)
    hidden = []
    for row, bias in zip(encoding.input.weight, encoding.input.bias, strict=True):
        value = bias + (row * r).sum()
        hidden.append(value * (1 + torch.erf(value / math.sqrt(2))) / 2)
    middle = torch.stack(hidden)
    rows = zip(encoding.output.weight, encoding.output.bias, strict=True)
    return torch.stack([bias + (row * middle).sum() for row, bias in rows])


@pytest.mark.parametrize(("axes", "dim", "features"), [(1, 5, None), (2, 4, 10), (3, 6, 2)])
def test_equals_loops(axes: int, dim: int, features: int | None) -> None:
    """Fractional, negative and far positions, rows of the batch at different ones."""
    encoding = Fourier(dim=dim, axes=axes, features=features, hidden=7).double()
    positions = 30 * torch.randn(2, 3, axes, dtype=torch.float64)
    x = torch.randn(2, 3, dim, dtype=torch.float64)
    got = encoding(x, Layout.at(positions))
    expected = torch.stack([torch.stack([loops(encoding, p) for p in row]) for row in positions])
    agree_with_gradients(got, x + expected, list(encoding.parameters()))


def test_worked_by_hand() -> None:
    """One wave of a quarter turn a token, a hidden unit that reads the sine."""
    encoding = Fourier(dim=1, hidden=1, features=2)
    with torch.no_grad():
        encoding.frequencies.fill_(math.pi / 2)
        encoding.input.weight.copy_(torch.tensor([[0.0, 1.0]]))
        encoding.input.bias.zero_()
        encoding.output.weight.fill_(2.0)
        encoding.output.bias.fill_(0.25)
    got = encoding(torch.zeros(1, 3, 1), Layout.sequence(3)).flatten().tolist()
    u = 1 / math.sqrt(2)  # gelu(u) = u · Φ(u), Φ(0.70711) = 0.76025
    assert got == pytest.approx([0.25, 2 * u * 0.760250 + 0.25, 0.25], abs=1e-5)


def test_starts_as_a_gaussian_kernel() -> None:
    """At first products of wave vectors fall as exp(-d² / 2γ²), in every direction."""
    torch.manual_seed(0)
    encoding = Fourier(dim=2, axes=2, features=40000, gamma=5.0)
    assert encoding.frequencies.std().item() == pytest.approx(0.2, rel=0.02)
    places = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [5.0, 0.0], [0.0, 10.0]]])
    vectors = waves(Layout.at(places), encoding.frequencies)[0] / math.sqrt(40000)
    products = (vectors @ vectors[0]).tolist()
    expected = [math.exp(-d * d / 50) / 2 for d in (0, 5, 5, 10)]
    assert products == pytest.approx(expected, abs=0.01)


def test_gradients_reach_positions() -> None:
    positions = torch.rand(1, 4, 2, requires_grad=True)
    Fourier(dim=4, axes=2)(torch.zeros(1, 4, 4), Layout.at(positions)).sum().backward()
    assert positions.grad is not None
    assert (positions.grad != 0).all()


def test_autocast_does_not_merge_positions() -> None:
    """A bug others had: the product with frequencies taken in bfloat16, where 65537 is 65536."""
    encoding = Fourier(dim=8, gamma=1.0).requires_grad_(False)
    layout = Layout.at(torch.tensor([65536.0, 65537.0]))
    with torch.autocast("cpu", torch.bfloat16):
        first, second = encoding(torch.zeros(1, 2, 8), layout)[0]
    assert not torch.allclose(first, second, atol=1e-3)
