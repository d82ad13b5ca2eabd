"""Multiplicative positions against loops."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.multiplicative import Multiplicative


@pytest.mark.parametrize("bound", [None, 1.0, 0.25])
def test_equals_loops(bound: float | None) -> None:
    encoding = Multiplicative(dim=3, max_length=6, bound=bound).requires_grad_(False)
    encoding.table.normal_()
    positions = torch.tensor([[0.0, 5.0], [2.5, 1.0]])
    x = torch.randn(2, 2, 3)
    got = encoding(x, Layout.at(positions))
    for b in range(2):
        for i in range(2):
            for c in range(3):
                low = math.floor(positions[b, i].item())
                share = positions[b, i].item() - low
                above = encoding.table[min(low + 1, 5), c].item()
                weight = (1 - share) * encoding.table[low, c].item() + share * above
                gain = 1 + (weight if bound is None else bound * math.tanh(weight / bound))
                assert got[b, i, c].item() == pytest.approx(x[b, i, c].item() * gain, abs=1e-5)


def test_starts_as_the_identity() -> None:
    x = torch.randn(2, 5, 4)
    assert torch.equal(Multiplicative(dim=4, max_length=5)(x, Layout.sequence(5)), x)


def test_a_number_by_hand() -> None:
    encoding = Multiplicative(dim=1, max_length=1).requires_grad_(False)
    encoding.table.fill_(math.atanh(0.5))
    assert encoding(torch.tensor([[[4.0]]]), Layout.sequence(1)).item() == pytest.approx(6.0)


def test_magnitude_stays_bounded_through_any_stack() -> None:
    encoding = Multiplicative(dim=4, max_length=3, bound=0.5).requires_grad_(False)
    encoding.table.fill_(1e6)
    out = encoding(torch.ones(1, 3, 4), Layout.sequence(3))
    assert out.max().item() <= 1.5
