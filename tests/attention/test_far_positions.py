"""Positions where 32-bit integers end and beyond, and windows wider than 64 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.native.posing import record_of
from posenc.attention.call import Call
from posenc.attention.problem.offsets import Offsets
from posenc.errors import BackendRefusal
from posenc.testing.backend_laws import serving
from tests.attention.comparing import agree, built, draw_for, results
from tests.support.exhaustive import in_turn

FAR = [2**31 - 10, 2**32, 2**40]

METHODS: dict[str, dict[str, object]] = {
    "rope": {"head_dim": 8},
    "alibi": {"heads": 4},
    "shaw": {"head_dim": 8},
    "contextual": {"head_dim": 8},
    "fire": {"heads": 4},
    "dape": {"heads": 4},
    "cope": {"head_dim": 8},
    "stick_breaking": {},
}


def _encoding(name: str) -> Encoding:
    torch.manual_seed(3)
    return posenc.create(name, **METHODS[name]).double()


def _inputs(grid: Grid) -> list[Tensor]:
    return draw_for(grid, rows=1, width=8, dtype=torch.float64)


def _packed(start: int) -> Layout:
    packed = Layout.packed([20, 15])
    positions, order = packed.positions.double() + start, packed.order + start
    return Layout(positions, order, document=packed.document)


def _results(grid: Grid, encoding: Encoding, backend: str) -> list[Tensor]:
    return results(_inputs(grid), grid, encoding, backend, lse=False)


def _check(grid: Grid, encoding: Encoding, tolerance: float = 1e-9) -> None:
    """Compare all backends that serve a call with the reference, with and without gradients."""
    expected = _results(grid, encoding, "reference")
    for backend in ("auto", *serving(*_inputs(grid), grid, encoding)):
        agree(_results(grid, encoding, backend), expected, tolerance)
    with torch.no_grad():
        output = attend(*_inputs(grid), grid, encoding)
    agree([output], expected[:1], tolerance)


@pytest.mark.parametrize(("name", "far"), in_turn(2, list(METHODS), FAR))
def test_one_side_is_far_from_the_other(name: str, far: int) -> None:
    encoding = _encoding(name)
    for query, key in ((far, 0), (0, far)):
        causal = encoding.causal_only or query > 0
        plain = Grid(Layout.sequence(30, query), Layout.sequence(35, key), causal)
        for grid in (plain, Grid(_packed(query), _packed(key), causal)):
            _check(grid, encoding, 1e-9 + far * 2**-50)  # a bias may be as large as the distance


@pytest.mark.parametrize("name", METHODS)
def test_both_sides_are_far(name: str) -> None:
    for far in FAR:
        _check(Grid.of(Layout.sequence(30, far), causal=True), _encoding(name))
        _check(Grid.of(_packed(far), causal=True, window=7), _encoding(name))


@built
def test_tables_are_of_the_offsets_that_occur() -> None:
    grid = Grid(Layout.sequence(30, 2**40), Layout.sequence(35))
    inputs, encoding = _inputs(grid), _encoding("fire")
    problem = Call(*inputs, grid, encoding).problem().rotated
    assert encoding.score is not None
    form = encoding.score.fuse(problem.q, problem.k, grid, scale=problem.scale)
    assert form is not None
    record = record_of(problem, Offsets.regular(grid), (), form)
    assert len(record.pairs.tensors[0]) <= 30 + 35
    assert explain(*inputs, grid, encoding, backend="native").backend == "native"


@built
@pytest.mark.parametrize("distance", [2**16, 2**32, 2**40])
def test_documents_far_from_one_another(distance: int) -> None:
    """Tables would hold all offsets between them."""
    packed = Layout.packed([20, 15])
    apart = packed.document * distance  # type: ignore[operator]
    query = Layout(packed.positions.double() + apart[..., None], packed.order + apart, apart)
    grid = Grid(query, Layout(packed.positions, packed.order, apart))
    encoding = _encoding("contextual")
    _check(grid, encoding)
    with pytest.raises(BackendRefusal, match="too far apart"):
        attend(*_inputs(grid), grid, encoding, backend="native")


@built
def test_rows_without_documents_are_as_far_as_the_others() -> None:
    """Nothing is visible in them, but kernels read the terms of hidden pairs too."""
    order = torch.arange(20).expand(2, -1) + 2**40
    valid = torch.tensor([[True], [False]]).expand(2, 20)
    query = Layout(order.double().unsqueeze(-1), order, valid=valid)
    grid = Grid(query, Layout.padded([20, 20]))
    torch.manual_seed(5)
    inputs = tuple(torch.randn(2, 4, 20, 8) for _ in range(3))
    encoding = _encoding("contextual").float()
    got, expected = (attend(*inputs, grid, encoding, backend=b) for b in ("native", "reference"))  # type: ignore[misc]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("window", [2**62, 2**63 - 1, 2**64, 10**30])
def test_windows_that_hide_nothing(window: int) -> None:
    for layout in (Layout.sequence(40), _packed(0), Layout.at(torch.rand(40))):
        for causal in (False, True):
            grid, whole = Grid(layout, layout, causal, window), Grid(layout, layout, causal)
            assert torch.equal(grid.visible, whole.visible)
            for encoding in (Encoding(), _encoding("alibi"), _encoding("shaw"), _encoding("fire")):
                expected = _results(whole, encoding, "reference")
                for backend in serving(*_inputs(grid), grid, encoding):
                    agree(_results(grid, encoding, backend), expected, 1e-5)
