"""The compiled kernels' terms of pairs outside the structured form, against the reference."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc.attention import explain
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.test_native import _agree, _both, _inputs, _poisoned, built

__all__ = ["_poisoned"]

WIDTH, HEADS = 24, 4

METHODS: dict[str, dict[str, object]] = {"fire": {"heads": HEADS, "hidden": 9, "threshold": 20.0}}

HALVES = [torch.bfloat16, torch.float16]


def _encoding(name: str) -> Encoding:
    torch.manual_seed(3)
    encoding = posenc.create(name, **METHODS[name])
    for key, parameter in encoding.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("scale" in key or "stretch" in key), std=0.4)
    return encoding


def _check(
    name: str, grid: Grid, *, dtype: torch.dtype = torch.float32, tolerance: float = 3e-5
) -> None:
    encoding = _encoding(name)
    rows = max(2, grid.query.batch)
    inputs = [x.detach() for x in _inputs(grid.query.length, grid.key.length, rows=rows)]
    signals = torch.randn(rows, grid.key.length, 32)
    wide = torch.promote_types(dtype, torch.float32)
    found = []
    for kind, of_encoding, backend in (
        (torch.float64, torch.float64, "reference"),
        (dtype, wide, "native"),
    ):
        encoding.to(of_encoding)
        q, k, v = (x.to(kind).requires_grad_() for x in inputs)
        seen = _observed(encoding, grid, signals.to(of_encoding))
        found.append([x.double() for x in _both((q, k, v), seen, encoding, backend)])
    _agree(found[1], found[0], tolerance)


def _observed(encoding: Encoding, grid: Grid, x: torch.Tensor) -> Grid:
    keys = encoding.observe(x, grid.key)
    queries = encoding.observe(x[:, -grid.query.length :], grid.query)
    return Grid(queries, keys, grid.causal, grid.window)


@built
@pytest.mark.parametrize("size", [(1, 1), (1, 65), (63, 63), (65, 65), (30, 65), (40, 600)])
@pytest.mark.parametrize("name", METHODS)
def test_values_and_gradients(name: str, size: tuple[int, int]) -> None:
    keys = Layout.sequence(size[1])
    queries = keys.slice(size[1] - size[0], size[1])
    for dtype in (torch.float64, torch.float32):
        _check(name, Grid(queries, keys, causal=True), dtype=dtype)
    if not _encoding(name).causal_only:
        _check(name, Grid(queries, keys))


@built
@pytest.mark.parametrize("name", METHODS)
def test_windows_documents_and_padding(name: str) -> None:
    for causal in (True,) if _encoding(name).causal_only else (False, True):
        _check(name, Grid.of(Layout.sequence(70, start=7), causal=causal, window=6))
        _check(name, Grid.of(Layout.packed([20, 1, 44]), causal=causal))
        _check(name, Grid.of(Layout.padded([65, 20], side="left"), causal=causal, window=9))
        _check(name, Grid.of(Layout.padded([40, 65]), causal=causal))


@built
@pytest.mark.parametrize("name", METHODS)
def test_queries_that_see_no_key(name: str) -> None:
    _check(name, Grid(Layout.sequence(20), Layout.sequence(30, start=12), causal=True))


@built
@pytest.mark.parametrize("size", [(1100, 1100), (300, 1100)])
@pytest.mark.parametrize("name", METHODS)
def test_many_tiles(name: str, size: tuple[int, int]) -> None:
    keys = Layout.sequence(size[1])
    grid = Grid(keys.slice(size[1] - size[0], size[1]), keys, causal=True)
    _check(name, grid, dtype=torch.float64)


@built
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", METHODS)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    _check(name, Grid.of(Layout.sequence(65), causal=True), dtype=dtype, tolerance=0.04)


@built
@pytest.mark.parametrize("name", METHODS)
def test_explain_names_it(name: str) -> None:
    encoding, grid = _encoding(name), Grid.of(Layout.sequence(33), causal=True)
    seen = _observed(encoding, grid, torch.randn(2, 33, 32))
    assert "compiled" in explain(*_inputs(33, 33), seen, encoding, backend="native").how
