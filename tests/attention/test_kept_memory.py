"""Memory kept by calls: no more with more calls, and nothing of encodings that are gone."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import Grid, Layout, attend
from posenc.lab.training.machine import PeakMemory

pytestmark = pytest.mark.usefixtures("entered")

KEPT = ("nope", "rope", "alibi", "t5", "shaw", "deberta", "tupe", "transformer_xl")
"""Encodings of which something is kept: prepared calls, projections, terms, rotations."""

SHARED = (Layout.sequence(256), Layout.packed([200, 56]))

CALLS = 10_000
MOST = 32 * 2**20
"""Bytes that these calls may add, after as many of other shapes that fill what is kept. Intervals
alone, a grid for each call, would have 10 times as many."""


def make(name: str) -> posenc.Encoding:
    return posenc.create(name, dim=32, heads=4, max_length=256, causal=True).eval()


def call(encoding: posenc.Encoding, number: int) -> None:
    """A call of a shape that is met four times in a row, and no more."""
    shape = number // 4
    length, batch, start = 1 + shape % 60, 1 + shape % 7, shape % 11
    q, k, v = (torch.ones(batch, 4, length, 8) for _ in range(3))
    layout = Layout.sequence(length, start)
    if number % 3 == 0:  # documents and intervals of a layout that lives as long as all calls
        layout, grid = SHARED[start % 2], Grid.of(SHARED[start % 2], causal=True)
        q, k, v = (torch.ones(1, 4, layout.length, 8) for _ in range(3))
        attend(q, k, v, grid.chunked(1 + shape % 40), encoding)
    else:
        attend(q, k, v, Grid.of(layout, causal=True), encoding)


@pytest.mark.long
@torch.no_grad()
def test_memory_is_flat_over_calls_of_varying_shapes() -> None:
    encodings = [make(name) for name in KEPT]
    for number in range(CALLS):
        call(encodings[number % len(KEPT)], number // len(KEPT))
    peak = PeakMemory(torch.device("cpu"))
    for number in range(CALLS, 2 * CALLS):
        call(encodings[number % len(KEPT)], number // len(KEPT))
    assert peak.used() < MOST
