"""Sinks and caps by the Triton kernels, interpreted; run by ``test_triton.py``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.errors import BackendRefusal
from tests.attention.triton_kernels import _small_squares, check, everything, inputs
from tests.attention.triton_sums import cope

__all__ = ["_small_squares"]

pytestmark = pytest.mark.usefixtures("poisoned")

GRIDS = {
    "causal": Grid.of(Layout.sequence(20), causal=True),
    "window": Grid.of(Layout.sequence(33), window=9),
    "unseeing": Grid(Layout.sequence(20), Layout.sequence(20, 7), causal=True),
    "padded": Grid.of(Layout.padded([20, 9], side="left"), causal=True),
    "packed": Grid.of(Layout.packed([17, 1, 8]), causal=True),
}

EXTRAS = {"sinks": (True, None), "cap": (False, 0.9), "both": (True, 0.9)}


def extra(name: str) -> dict[str, Any]:
    sinks, softcap = EXTRAS[name]
    given = torch.tensor([0.7, -math.inf if name == "both" else -1.0]).requires_grad_()
    return {"sinks": given, "softcap": softcap} if sinks else {"softcap": softcap}


@pytest.mark.parametrize(
    ("where", "extras"),
    [
        *((where, "both") for where in GRIDS if where != "causal"),
        *(("causal", "sinks"), ("causal", "cap")),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("causal", "both"), ("unseeing", "sinks"))
        ),
    ],
)
def test_the_whole_formula(where: str, extras: str) -> None:
    grid = GRIDS[where]
    rows = grid.query.batch
    encoding = everything(by_query=extras == "sinks")
    check(encoding, grid, inputs(grid, batch=rows), **extra(extras))


@pytest.mark.parametrize("name", ["nope", "rope", "fire"])
def test_other_forms(name: str) -> None:
    encoding = posenc.create(name, **({} if name == "nope" else {"head_dim": 16, "heads": 2}))
    grid = GRIDS["packed"]
    check(encoding.double(), grid, inputs(grid), **extra("both"))


def test_sums_that_are_carried() -> None:
    grid = GRIDS["causal"]
    check(cope(), grid, inputs(grid), **extra("sinks"))
    with pytest.raises(BackendRefusal, match="do not cap"):
        attend(*inputs(grid), grid, cope(), backend="triton", softcap=2.0)


def test_sums_of_gates_have_no_cap() -> None:
    grid = GRIDS["causal"]
    with pytest.raises(BackendRefusal, match="a cap takes sums of gates"):
        attend(*inputs(grid), grid, everything(), backend="triton", softcap=2.0)


@pytest.mark.parametrize("cap", [0.05, 50.0, 1e5])
def test_caps_of_any_size(cap: float) -> None:
    """Logits far above the cap, and far below it, where one less e^-2x would cancel."""
    grid = GRIDS["causal"]
    check(Encoding(), grid, [(3 * x).detach().requires_grad_() for x in inputs(grid)], softcap=cap)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("padded", [False, True])
def test_one_query(extras: str, *, padded: bool) -> None:
    key = Layout.padded([40, 9], side="left") if padded else Layout.sequence(40)
    grid, encoding = Grid(key.slice(39, 40), key, True), everything(by_query=extras == "sinks")
    with torch.no_grad():
        given = inputs(grid, batch=key.batch)
        assert "one query" in str(explain(*given, grid, encoding, backend="triton"))
        found = [
            attend(*given, grid, encoding, backend=x, return_lse=True, **extra(extras))
            for x in ("triton", "reference")
        ]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
