"""Layouts of queries and keys may have positions of different dtypes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from posenc import Grid, Layout, attend, create
from posenc.errors import PosencError
from posenc.registry import ENCODINGS

HEADS, WIDTH, LENGTH = 2, 8, 6
CONTEXT = {"dim": HEADS * WIDTH, "heads": HEADS, "head_dim": WIDTH, "max_length": 8}
SINGLE = torch.tensor([[0.0, 2.0, 1.0, 4.0, 3.0, 5.0]])
ROWS = torch.randn(3, 1, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ENCODINGS)
def test_float64_positions_beside_float32(name: str) -> None:
    """Integers are the same numbers in both, so that outputs are."""
    encoding = create(name, causal=True, **CONTEXT)
    x = ROWS[0].transpose(1, 2).flatten(2)
    outputs = []
    for dtypes in product((torch.float32, torch.float64), repeat=2):
        sides = [encoding.observe(x, Layout.at(SINGLE.to(dtype))) for dtype in dtypes]
        try:
            outputs.append(attend(*ROWS, Grid(*sides, causal=True), encoding, backend="reference"))
        except PosencError:
            continue
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)
