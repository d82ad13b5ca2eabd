"""Multiplicative positions with shared parameters against loops, and a number by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.multiplicative_shared import MultiplicativeShared


@pytest.mark.parametrize("bound", [None, 1.0, 0.25])
def test_equals_loops(bound: float | None) -> None:
    encoding = MultiplicativeShared(dim=3, base=100.0, bound=bound).requires_grad_(False)
    encoding.sine.normal_()
    encoding.cosine.normal_()
    positions = torch.tensor([[0.0, 5.0], [-2.5, 1000.0]])
    x = torch.randn(2, 2, 3)
    got = encoding(x, Layout.at(positions))
    for b in range(2):
        for i in range(2):
            for c in range(3):
                angle = positions[b, i].item() * 100.0 ** (-c / 3)
                wave = encoding.sine[c].item() * math.sin(angle)
                wave += encoding.cosine[c].item() * math.cos(angle)
                gain = 1 + (wave if bound is None else bound * math.tanh(wave / bound))
                assert got[b, i, c].item() == pytest.approx(x[b, i, c].item() * gain, abs=1e-4)


def test_a_number_by_hand() -> None:
    """At position 0 the gain is 1 + tanh(v): 1.5 for v = artanh(1/2)."""
    encoding = MultiplicativeShared(dim=1).requires_grad_(False)
    encoding.sine.fill_(7.0)
    encoding.cosine.fill_(math.atanh(0.5))
    assert encoding(torch.tensor([[[4.0]]]), Layout.sequence(1)).item() == pytest.approx(6.0)


def test_its_parameters_do_not_depend_on_the_length() -> None:
    encoding = MultiplicativeShared(dim=4)
    x = torch.randn(2, 5, 4)
    assert torch.equal(encoding(x, Layout.sequence(5, start=10**6)), x)
    assert sum(parameter.numel() for parameter in encoding.parameters()) == 8
