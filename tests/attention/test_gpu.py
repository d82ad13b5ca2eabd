"""What serves on a CUDA device, against ``reference`` in float64."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import Grid, Layout, attend, explain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYOUTS = {
    "sequence": lambda: Layout.sequence(130, device="cuda"),
    "padded": lambda: Layout.padded([130, 40], side="left", device="cuda"),
    "packed": lambda: Layout.packed([60, 70], device="cuda"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "shaw"])
def test_equals_reference(name: str, dtype: torch.dtype, causal: bool, layout: str) -> None:
    torch.manual_seed(0)
    encoding = posenc.create(name, dim=256, heads=4, head_dim=64).to("cuda")
    grid = Grid.of(LAYOUTS[layout](), causal=causal)
    inputs = [torch.randn(2, 4, 130, 64, device="cuda", dtype=dtype) for _ in range(3)]
    wide = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    expected = attend(*wide, grid, encoding, backend="reference")
    wanted = torch.autograd.grad(expected.sin().sum(), wide)
    assert explain(*inputs, grid, encoding).backend in ("sdpa", "reference")
    got = attend(*inputs, grid, encoding)
    gradients = torch.autograd.grad(got.sin().sum(), inputs)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=4 * tolerance, rtol=tolerance)
