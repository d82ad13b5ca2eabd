"""Sandwich against the product of two sinusoid tables, as the paper writes it."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Grid, Layout
from posenc.encodings.score.sandwich import Sandwich


@pytest.mark.parametrize("heads", [1, 6, 8])
@pytest.mark.parametrize(("queries", "keys", "start"), [(5, 5, 0), (3, 9, 300), (1, 1, 0)])
def test_equals_products_of_sinusoids(heads: int, queries: int, keys: int, start: int) -> None:
    grid = Grid(Layout.sequence(queries, start=start), Layout.sequence(keys))
    got = Sandwich(heads=heads, width=32)(
        torch.zeros(1, heads, queries, 8), torch.zeros(1, heads, keys, 8), grid, scale=1.0
    )
    for i in range(queries):
        for j in range(keys):
            product = 0.0
            for t in range(16):
                frequency = 10000.0 ** (-2 * t / 32)
                a, b = (start + i) * frequency, j * frequency
                product += math.sin(a) * math.sin(b) + math.cos(a) * math.cos(b)
            for h in range(heads):
                expected = product / (8 * (h + 1) / heads)
                assert float(got[0, h, i, j]) == pytest.approx(expected, abs=2e-4)


def test_a_number_by_hand() -> None:
    # d̄ = 2 has the one frequency 1: cos(π) = -1, over 8·1/4 = 2 in the first of four heads.
    bias = Sandwich(heads=4, width=2).bias(torch.tensor([math.pi]))
    assert bias.flatten().tolist() == pytest.approx([-1 / 2, -1 / 4, -1 / 6, -1 / 8])
