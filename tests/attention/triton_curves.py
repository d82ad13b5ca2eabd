"""The Triton kernels with a function of the distance, interpreted; run by ``test_triton.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.errors import BackendRefusal
from tests.attention.triton_kernels import HEADS, check, inputs, sequence

pytestmark = pytest.mark.usefixtures("poisoned")


def fire(heads: int = HEADS, hidden: int = 9, scale: float = 0.1) -> Encoding:
    torch.manual_seed(3)
    encoding = posenc.create("fire", heads=heads, hidden=hidden, scale=scale, threshold=20.0)
    for parameter in encoding.score.output.parameters():  # type: ignore[union-attr]
        torch.nn.init.normal_(parameter)
    return encoding.double()


FIRE = fire()


def test_many_knots_in_a_tile() -> None:
    """Tokens so far apart that a tile meets most of the pieces."""
    grid, encoding = sequence(20, causal=True), fire(hidden=70, scale=30.0)
    check(encoding, grid, inputs(grid))


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *((torch.float32, 33), (torch.float16, 20)),
        pytest.param(torch.bfloat16, 20, marks=pytest.mark.exhaustive),
    ],
)
def test_errs_as_little_as_the_definition(dtype: torch.dtype, length: int) -> None:
    """Gradients of the scale and the threshold, too, whose sums by number and by query cancel."""
    layout, encoding = Layout.sequence(length), fire()
    exact = Grid.of(replace(layout, positions=layout.positions.double()), causal=True)
    grid = Grid.of(layout, causal=True)
    given = [x.detach() for x in inputs(grid, batch=2, dtype=dtype)]
    learned = list(encoding.parameters())

    def computed(grid: Grid, backend: str, dtype: torch.dtype) -> list[Tensor]:
        tensors = [x.to(dtype).requires_grad_() for x in given]
        output = attend(*tensors, grid, encoding, backend=backend)
        found = torch.autograd.grad(output.double().sin().sum(), [*tensors, *learned])
        return [x.double() for x in (output, *found)]

    wanted = computed(exact, "reference", torch.float64)
    rounded = computed(grid, "reference", dtype)
    for mine, theirs, true in zip(computed(grid, "triton", dtype), rounded, wanted, strict=True):
        # Gradients of what all keys of a query share cancel but for rounding.
        size = max(4.0, true.abs().max().item())
        allowed = 4 * (theirs - true).abs().max() + 8 * torch.finfo(dtype).eps * size
        assert (mine - true).abs().max() <= allowed


def test_refuses_with_the_reason() -> None:
    uneven = Layout.at(torch.tensor([0.0, 1.0, 3.0]))
    for encoding, layout, reason in (
        (FIRE, uneven, "one position apart"),
        (fire(hidden=1024), Layout.sequence(9), "1024 pieces at most"),
    ):
        grid = Grid.of(layout, causal=True)
        with pytest.raises(BackendRefusal, match=reason):
            attend(*inputs(grid), grid, encoding, backend="triton")
