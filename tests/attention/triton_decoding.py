"""The Triton backend's kernel for one query, by Triton's interpreter; run by ``test_triton.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.triton import launch
from posenc.attention.problem.record import (
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
    flatten,
)
from posenc.attention.problem.terms import Terms
from posenc.encoding import ScoreTerm
from posenc.encodings.score.stick_breaking import StickBreaking
from posenc.errors import BackendRefusal

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, KEY_HEADS, WIDTH = 6, 2, 16

ENCODINGS = {
    "rope": posenc.create("rope", head_dim=WIDTH),
    "t5": posenc.create("t5", heads=HEADS, max_distance=12, buckets=8, causal=True),
}

PAST = Layout.padded([40, 9], side="left")

GRIDS = {
    "sequence": Grid(Layout.sequence(1, 39), Layout.sequence(40), causal=True),
    "window": Grid(Layout.sequence(1, 39), Layout.sequence(40), causal=True, window=7),
    "padded": Grid(PAST.slice(39, 40), PAST, causal=True),
    "irregular": Grid(Layout.at(torch.tensor([7.3])), Layout.at(torch.linspace(0, 9, 33))),
}


def inputs(grid: Grid, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, 1), (KEY_HEADS, grid.key.length), (KEY_HEADS, grid.key.length))
    return [torch.randn(2, *size, WIDTH, generator=generator).to(dtype) for size in sizes]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _learned() -> None:
    """Random parameters: those that start at zero would hide mistakes."""
    torch.manual_seed(0)
    for encoding in ENCODINGS.values():
        for parameter in encoding.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter)


def test_constants_of_a_query_are_in_the_lse() -> None:
    encoding = posenc.create("forgetting", dim=96, heads=HEADS)
    layout = encoding.observe(torch.randn(2, 40, 96), Layout.sequence(40))
    grid = Grid(layout.slice(39, 40), layout, causal=True)
    given = inputs(grid)
    assert "one query" in str(explain(*given, grid, encoding, backend="triton"))
    got = attend(*given, grid, encoding, backend="triton", return_lse=True)
    expected = attend(*given, grid, encoding, backend="reference", return_lse=True)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("grid", ["sequence", "window", "padded"])
def test_many_splits_are_put_together(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, of which some hold nothing that is seen."""
    monkeypatch.setattr(launch, "PROGRAMS", 64)
    monkeypatch.setattr(launch, "COMBINED", 2)
    given, where = inputs(GRIDS[grid]), GRIDS[grid]
    got = attend(*given, where, ENCODINGS["t5"], backend="triton", return_lse=True)
    expected = attend(*given, where, ENCODINGS["t5"], backend="reference", return_lse=True)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


def test_nothing_visible_gives_zeros() -> None:
    grid = Grid(Layout.sequence(1), Layout.sequence(20, 5), causal=True)
    output, lse = attend(*inputs(grid), grid, ENCODINGS["t5"], backend="triton", return_lse=True)
    assert not output.any()
    assert lse.isneginf().all()


def test_gradients_take_the_other_kernels() -> None:
    grid, encoding = GRIDS["sequence"], ENCODINGS["t5"]
    given = inputs(grid)
    with torch.enable_grad():
        assert "every offset" in str(explain(*given, grid, encoding, backend="triton"))
        given[0].requires_grad_()
        assert "every offset" in str(explain(*given, grid, Encoding(), backend="triton"))


def test_refuses_what_replaces_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StickBreaking, "fuse", ScoreTerm.fuse)
    grid = GRIDS["sequence"]
    with pytest.raises(BackendRefusal, match="replaces the product"):
        attend(*inputs(grid), grid, posenc.create("stick_breaking"), backend="triton")


def test_compiled_equals_eager() -> None:
    grid, encoding = GRIDS["padded"], ENCODINGS["rope"] + ENCODINGS["t5"]
    given = inputs(grid)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), run(*given))


def test_the_operator_is_registered_as_it_behaves() -> None:
    q, k, v = inputs(GRIDS["sequence"])
    bias = torch.randn(2, HEADS, 40)
    checks = ("test_schema", "test_faketensor")
    record = KernelProblem(
        *(
            q,
            k,
            v,
            0.25,
            Terms(column=bias),
            PairTerm("single"),
            Geometry(),
            SegmentMask(),
            RotaryFactors(),
        )
    )
    operator = torch.ops.posenc.triton.default
    torch.library.opcheck(operator, tuple(flatten(record)), test_utils=checks)
