"""Dropout and repeated runs of the Triton kernels, interpreted; run by ``test_triton.py``."""

from __future__ import annotations

import pytest
import torch

from posenc import attend, create
from tests.attention.comparing import compare_dropped
from tests.attention.triton_curves import FIRE
from tests.attention.triton_kernels import HEADS, everything, inputs, sequence
from tests.attention.triton_sums import cope

pytestmark = pytest.mark.usefixtures("poisoned")

ENCODINGS = {
    "t5": create("t5", heads=HEADS, max_distance=12, buckets=8, causal=True),
    "products and values": everything(),
    "fire": FIRE,
    "sticks": create("stick_breaking"),
    "counts": cope(),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_dropout_is_the_same_in_both_directions(name: str) -> None:
    grid = sequence(32, causal=True)
    compare_dropped(inputs(grid), grid, ENCODINGS[name], "triton", share=0.4, tolerance=5e-5)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_run_gives_the_same_bits(name: str) -> None:
    grid, encoding = sequence(20, causal=True), ENCODINGS[name]
    given = inputs(grid)
    runs = []
    for _ in range(2):
        output = attend(*given, grid, encoding, backend="triton")
        learned = [*given, *encoding.parameters()]
        runs.append([output, *torch.autograd.grad(output.sin().sum(), learned)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
