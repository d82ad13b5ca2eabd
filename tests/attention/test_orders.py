"""Orders that are not positions, and positions of keys far from those of queries."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout
from posenc.errors import BackendRefusal
from tests.attention.comparing import compare
from tests.support.exhaustive import in_turn

LENGTH = 150

RAMP = torch.arange(LENGTH)

ENGINES = ["native", "blockwise", "auto"]


def layout(
    positions: Tensor, order: Tensor, *, documents: tuple[int, ...] = (LENGTH,), rows: int = 1
) -> Layout:
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    return Layout(
        positions.float().view(1, -1, 1), order.view(1, -1), document=document.expand(rows, -1)
    )


PLAIN = layout(RAMP, RAMP)

GRIDS = {
    "order in steps of two": (layout(RAMP, 2 * RAMP), PLAIN),
    "pairs of one order": (layout(RAMP, RAMP // 2),) * 2,
    "order backwards": (layout(RAMP, RAMP.flip(0)),) * 2,
    "position backwards": (layout(RAMP.flip(0), RAMP),) * 2,
    "positions in steps of two": (layout(2 * RAMP, RAMP),) * 2,
    "order ahead of position": (layout(RAMP, RAMP + 40), PLAIN),
    "position ahead of order": (PLAIN, layout(RAMP + 40, RAMP)),
    "documents that restart": (
        layout(RAMP % 75, RAMP % 75, documents=(75, 75)),
        layout(RAMP % 75 + 3, RAMP % 75, documents=(75, 75)),
    ),
    "documents in other orders": (
        layout(RAMP % 75, RAMP % 75, documents=(75, 75)),
        layout(RAMP % 75, RAMP % 75 + 20, documents=(75, 75)),
    ),
    "halves of positions": (layout(RAMP + 0.5, RAMP), PLAIN),
}


@pytest.mark.parametrize(
    ("grid", "name", "backend"), in_turn(3, list(GRIDS), ["shaw", "fire", "alibi"], ENGINES)
)
def test_orders_that_are_not_positions(grid: str, name: str, backend: str) -> None:
    torch.manual_seed(0)
    encoding = posenc.create(name, heads=2, head_dim=8)
    q, k, v = (torch.randn(2, 2, LENGTH, 8).requires_grad_() for _ in range(3))
    for causal, window in ((True, None), (False, 9), (True, 9)):
        pairs = Grid(*GRIDS[grid], causal=causal, window=window)
        with suppress(BackendRefusal):
            compare((q, k, v), pairs, encoding, backend, lse=False, tolerance=1e-4)


@pytest.mark.parametrize("backend", ["native", "sdpa", "auto"])
@pytest.mark.parametrize("far", ["query", "key"])
def test_rotations_of_one_side_in_float64(far: str, backend: str) -> None:
    """Positions past 2^24 are float64, and so are factors, of one side alone."""
    torch.manual_seed(1)
    near, apart = Layout.sequence(600), Layout.sequence(600, start=2**25)
    grid = Grid(apart, near) if far == "query" else Grid(near, apart)
    encoding = posenc.create("rope", head_dim=16)
    q, k, v = (torch.randn(1, 2, 600, 16).requires_grad_() for _ in range(3))
    compare((q, k, v), grid, encoding, backend, lse=False, tolerance=1e-4)
