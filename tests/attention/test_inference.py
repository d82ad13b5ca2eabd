"""Layouts that were made in inference mode and are used outside, and the other way round."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import Grid, Layout, attend
from tests.support.exhaustive import in_turn

SIGNALLED = (
    *("cable", "forgetting", "grape_additive", "grape_contextual", "path", "relative_logits"),
)
"""Encodings that compute a number for each token."""


@pytest.mark.parametrize(
    ("name", "backend", "inside"),
    in_turn(4, SIGNALLED, ["auto", "reference", "blockwise", "native"], ["made", "used"]),
)
def test_gradients_by_layouts_of_inference_mode(name: str, backend: str, inside: str) -> None:
    encoding = posenc.create(name, dim=16, heads=2, head_dim=8, max_length=8, causal=True)
    x, q = torch.randn(1, 6, 16), torch.randn(1, 2, 6, 8, requires_grad=True)

    def grid() -> Grid:
        found = Grid.of(encoding.observe(x, Layout.packed([4, 2])), causal=True)
        assert found.key.signal is not None
        return found

    def gradient(grid: Grid, backend: str) -> torch.Tensor:
        output = attend(q, q, q, grid, encoding, backend=backend)
        return torch.autograd.grad(output.square().sum(), q)[0]

    expected = gradient(grid(), "reference")
    with torch.inference_mode(inside == "made"):
        made = grid()
    with torch.inference_mode():
        attend(q, q, q, made, encoding, backend=backend)
    torch.testing.assert_close(gradient(made, backend), expected)
