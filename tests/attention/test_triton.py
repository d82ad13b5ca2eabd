"""The Triton backend: its kernels, interpreted and compiled, and what needs no kernel."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import posenc
from posenc import Grid, Layout, attend
from posenc.attention.backends.triton import Triton, form
from posenc.attention.backends.triton.form import KernelForm, kernel_form
from posenc.attention.backends.triton.segments import segment_ids_of
from posenc.attention.call import Call
from posenc.attention.problem.offsets import Offsets, Spacing, find_spacing, spacing
from posenc.errors import BackendRefusal
from tests.support.versions import require_interpreter

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this system"
)
@pytest.mark.parametrize(
    ("way", "cases"),
    [
        *((way, "not exhaustive") for way in ("interpreted", "compiled")),
        pytest.param("interpreted", "exhaustive", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels(way: str, cases: str) -> None:
    """In a process of its own: Triton has to be told before anything imports it."""
    if way == "interpreted":
        require_interpreter()
    compiled = HERE / "triton_compiling.py"
    files = {compiled} if way == "compiled" else {*HERE.glob("triton_*.py")} - {compiled}
    assert files
    options = ["-q", "-p", "no:cacheprovider", "-m", cases]
    options += ["-p", "tests.support.interpreter"] if way == "interpreted" else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, sorted(files))],
        cwd=HERE.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": str(int(way == "interpreted"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout


def test_refuses_the_cpu() -> None:
    grid = Grid.of(Layout.sequence(5))
    given = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    with pytest.raises(BackendRefusal, match="on CUDA devices, not on cpu"):
        attend(*given, grid, posenc.create("t5", heads=2), backend="triton")


def brute(queries: int, keys: int, shift: int, causal: bool, window: int | None) -> list[list[int]]:
    """Visible offsets of every query."""
    rows = []
    for i in range(queries):
        offsets = [shift + j - i for j in range(keys)]
        seen = [d for d in offsets if not (causal and d > 0)]
        rows.append([d for d in seen if window is None or abs(d) < window])
    return rows


@pytest.mark.parametrize("max_distance", [None, 0, 3, 50])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 4), (True, 4)])
@pytest.mark.parametrize("sizes", [(9, 9, 0), (1, 12, -11), (5, 3, 20), (4, 6, -30)])
def test_entries(
    sizes: tuple[int, int, int], causal: bool, window: int | None, max_distance: int | None
) -> None:
    queries, keys, shift = sizes
    grid = Grid(Layout.sequence(queries), Layout.sequence(keys, shift), causal, window)
    offsets = Offsets.regular(grid)
    lowest, highest = offsets.entries(max_distance)
    assert shift - queries < lowest <= highest < shift + keys
    for i, seen in enumerate(brute(queries, keys, shift, causal, window)):
        for j in range(keys):
            offset = shift + j - i
            assert (offsets.band[0] <= offset <= offsets.band[1]) == (offset in seen)
            if offset in seen:
                read = min(max(offset, lowest), highest)
                far = 10**6 if max_distance is None else max_distance
                assert min(max(read, -far), far) == min(max(offset, -far), far)


def test_spacing() -> None:
    packed, padded = Layout.packed([4, 3]), Layout.padded([4, 2], side="left")
    assert spacing(Grid.of(packed)) == Spacing(0, True)
    assert spacing(Grid.of(padded, causal=True)) == Spacing(0, True)
    assert spacing(Grid(padded.slice(3, 4), padded)) == Spacing(-3, True)
    assert spacing(Grid(packed.slice(5, 7), packed)) == Spacing(-5, True)
    moved = packed.with_positions(packed.positions + 0.5)
    assert spacing(Grid.of(moved)) == Spacing(0, True)
    assert spacing(Grid(packed, moved)) is None
    assert spacing(Grid.of(Layout.at(torch.tensor([0.0, 1.0, 2.5])))) is None
    assert spacing(Grid.of(packed.with_positions(packed.positions * 2))) is None
    shuffled = Layout(packed.positions, packed.order.flip(1), document=packed.document)
    assert spacing(Grid.of(shuffled)) == Spacing(0, False)
    assert spacing(Grid.of(Layout.padded([0, 0]), causal=True)) == Spacing(0, True)


@pytest.mark.parametrize(
    "layout",
    [Layout.packed([2, 1, 4]), *(Layout.padded([4, 7], side=s) for s in ("left", "right"))],
)
def test_spacing_of_consecutive_tokens_is_not_read(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (layout, layout.slice(1, 6), layout.select(torch.tensor([0]))):
        assert spacing(Grid.of(part)) == find_spacing(Grid.of(part)) == Spacing(0, True)
        assert isinstance(find_spacing(Grid.of(part.to("meta"))), Spacing)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert isinstance(find_spacing(Grid.of(layout)), Spacing)
    moved = layout.with_positions(2 * layout.positions)
    for grid in (Grid.of(moved), Grid(layout.slice(1, 2), layout)):
        assert "inside a compiled graph" in str(find_spacing(grid))


@pytest.mark.usefixtures("entered")
def test_spacing_is_kept_whatever_the_mask() -> None:
    layout = Layout.packed([4, 3])
    spacing(Grid.of(layout))
    assert spacing(Grid.of(layout)) is spacing(Grid.of(layout, causal=True))


def test_positions_with_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Triton, "plan", lambda self, problem: kernel_form(problem))
    positions = torch.arange(5.0).view(1, 5, 1).requires_grad_()
    grid = Grid.of(Layout.sequence(5).with_positions(positions))
    given = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    with pytest.raises(BackendRefusal, match="no gradients for positions"):
        attend(*given, grid, posenc.create("t5", heads=2), backend="triton")


def test_devices_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid.of(Layout.sequence(5))
    encoding = posenc.create("deberta", heads=2, dim=512, head_dim=256)
    problem = Call(*torch.randn(3, 1, 2, 5, 256), grid, encoding).problem().rotated
    monkeypatch.setattr(form, "shared_memory", lambda device: 166_912)  # A100
    assert isinstance(kernel_form(problem), KernelForm)
    monkeypatch.setattr(form, "shared_memory", lambda device: 101_376)  # RTX 4090
    assert "130 KiB of shared memory, and the device has 99" in str(kernel_form(problem))
    plain = replace(problem, lowered=())
    assert isinstance(kernel_form(plain), KernelForm)


@pytest.mark.usefixtures("entered")
def test_segment_ids_hide_as_grids_do() -> None:
    packed, order = Layout.packed([4, 3]), torch.arange(7).unsqueeze(0)
    # Of 64 bits, in no order, and with padding.
    documents = torch.tensor([[5, 2**40, 5, -(2**62), 2**40 + 2**32, 5, 1], [0, 0, 1, 1, 1, 2, 2]])
    others = Layout(packed.positions, order, document=documents, valid=documents != 1)
    grids = [Grid.of(layout) for layout in (packed, Layout.padded([4, 0, 2], side="left"), others)]
    for grid in [*grids, Grid(others.slice(2, 6), others), Grid(packed, others)]:
        _, (query, key) = segment_ids_of(grid), segment_ids_of(grid)
        assert query.dtype == key.dtype == torch.int32
        equal = query.unsqueeze(2) == key.unsqueeze(1)
        assert torch.equal(equal.unsqueeze(1), grid.visible)
        assert segment_ids_of(grid)[0] is query


@pytest.mark.usefixtures("entered")
def test_segment_ids_of_evaluation_serve_training() -> None:
    grid = Grid.of(Layout.packed([4, 3]))
    with torch.inference_mode():
        segment_ids_of(grid), segment_ids_of(grid)
    assert not segment_ids_of(grid)[0].is_inference()
