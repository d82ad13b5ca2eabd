"""The record that kernels take: flat and back, read whole, and the engine's functions around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.backends.native import build, posing
from posenc.attention.backends.native.arguments import Arguments
from posenc.attention.call import Call
from posenc.attention.problem import offsets
from posenc.attention.problem.lowering import given_encoding
from posenc.attention.problem.offsets import Offsets, run_intervals
from posenc.attention.problem.record import (
    FIELDS,
    Flat,
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
    flatten,
    paths_of,
    restore,
)
from posenc.attention.problem.terms import AXES, Terms, read_terms
from posenc.encoding import BucketedTerms, Rotation, prepared
from posenc.encoding.prepared import reused_of_grid
from posenc.encodings.query_key.rope import Rope
from tests.support.watching import Watched

FOLDER = Path(posenc.__file__).parent / "attention"

ENGINE = [
    file
    for room in ("problem", "backends")
    for file in (FOLDER / room).rglob("*.py")
    if "kernels" not in file.parts
]


def whole() -> KernelProblem:
    """A record in which everything is there."""
    q, k, v = (torch.randn(2, heads, 5, 4) for heads in (4, 2, 2))
    terms = Terms(
        query_factor=torch.randn(1, 4, 5, 3),
        key_factor=torch.randn(1, 4, 5, 3),
        bias_by_offset=torch.randn(4, 9),
        column=torch.randn(1, 4, 5),
        left=torch.randn(2, 4, 5, 6),
        left_rows=torch.randn(1, 3, 6),
        right=torch.randn(2, 4, 5, 6),
        right_rows=torch.randn(1, 3, 6),
        value_rows=torch.randn(1, 3, 4),
        bucket=torch.arange(9) // 3,
        first=-4,
    )
    intervals = torch.zeros(3, 1, 5, dtype=torch.int32)
    ids, summary = torch.zeros(1, 5, dtype=torch.int32), torch.zeros(1, 1, 4, dtype=torch.int64)
    return KernelProblem(
        *(q, k, v, 0.5),
        terms=terms,
        pairs=PairTerm("mixing", tuple(torch.randn(4, 4) for _ in range(4))),
        geometry=Geometry(0, -4, 0, 5, 4, intervals),
        segments=SegmentMask(
            ids, ids + 1, ids.long(), ids.long() + 1, summary, summary + 1, True, 7
        ),
        rotary=RotaryFactors(*(torch.randn(1, 1, 5, 2) for _ in range(4)), adjacent=True),
        dropout=0.1,
        seed=torch.ones(1, dtype=torch.int64),
        sinks=torch.randn(1, 4, 1),
        softcap=2.0,
        tuned=False,
    )


def same(a: Any, b: Any) -> bool:
    if is_dataclass(a):
        return all(same(getattr(a, x.name), getattr(b, x.name)) for x in fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b if isinstance(a, torch.Tensor) else a == b


def test_a_flat_record_comes_back() -> None:
    record = whole()
    assert same(restore(flatten(record)), record)
    for field in FIELDS:  # each tensor may be missing
        if field.kind == "tensor" and "." in field.path:
            room, name = field.path.split(".")
            part = replace(getattr(record, room), **{name: None})
            other = replace(record, **{room: part})
            assert same(restore(flatten(other)), other)
    bare = replace(record, pairs=PairTerm(), sinks=None, seed=None)
    assert same(restore(flatten(bare)), bare)


def by_path(flat: Flat) -> dict[str, Tensor]:
    return dict(zip(paths_of(flat.words), flat.tensors, strict=True))


def test_tensors_go_by_their_paths() -> None:
    record = whole()
    flat = flatten(record)
    named = by_path(flat)
    assert named["terms.left_rows"] is record.terms.left_rows
    assert named["pairs.tensors.2"] is record.pairs.tensors[2]
    assert all(type(number) is int for number in flat.numbers)


FOR_OTHERS = {"tuned", *(field.path for field in FIELDS if field.path.startswith("segments."))}
"""Fields that the compiled kernels are never given: refused, or said by intervals."""


@pytest.mark.parametrize("intervals", [False, True])
def test_compiled_kernels_read_the_whole_record(*, intervals: bool) -> None:
    record = whole()
    if not intervals:
        record = replace(record, geometry=replace(record.geometry, intervals=None))
    watched = Watched(record)
    Arguments(watched)  # type: ignore[arg-type]
    every = {field.path for field in FIELDS}
    if intervals:  # they say what these say
        every -= {f"geometry.{name}" for name in ("shift", "lowest", "highest")}
    assert watched.read == every - FOR_OTHERS


def tensors_of(x: Any) -> Iterator[torch.Tensor]:
    """All tensors in dictionaries and tuples."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict | tuple):
        for inner in x.values() if isinstance(x, dict) else x:
            yield from tensors_of(inner)


@pytest.mark.parametrize("for_keys", [False, True])
def test_triton_kernels_are_given_the_whole_record(*, for_keys: bool) -> None:
    """Every tensor is in their tuples: as it is, since these need no copy."""
    pytest.importorskip("triton")
    from posenc.attention.backends.triton.launch import Launch

    record = replace(whole(), pairs=PairTerm(), sinks=torch.randn(2, 4, 5))
    halves = (torch.randn(1, 1, 5, 4).chunk(2, dim=-1) for _ in range(2))
    record = replace(record, rotary=RotaryFactors(*next(halves), *next(halves)))
    given = {x.data_ptr() for x in tensors_of(Launch(record).arguments(for_keys=for_keys))}
    flat = flatten(record)
    missing = {p for p, x in by_path(flat).items() if x.data_ptr() not in given}
    # Rows are by offset, intervals refused, and sines lie behind their cosines.
    others = {"terms.bucket", "geometry.intervals", "rotary.query_sine", "rotary.key_sine"}
    assert missing == others


@pytest.mark.parametrize("name", AXES)
def test_compiled_kernels_compute_every_term(name: str) -> None:
    """Forward, and its gradient backward, in one file."""
    texts = [file.read_text() for file in build.SOURCES.iterdir()]
    assert any(re.search(rf"terms\.{name}\b", text) and "gradient" in text for text in texts)


@pytest.mark.parametrize("file", ENGINE, ids=lambda file: str(file.relative_to(FOLDER)))
def test_functions_take_eight_arguments_at_most(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls", "ctx")])
            assert count + (given.vararg is not None) <= 8, f"{node.name} takes {count}"


@pytest.mark.parametrize("name", ["api", "call", "dispatch", "module", "decoding", "trial"])
def test_the_core_imports_no_backend(name: str) -> None:
    """But the interface of all, and the definition."""
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[:3] == ["posenc", "attention", "backends"]:
                assert parts[3] == "common", f"{name}.py imports {node.module}"


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Grid]:
    """Grids of which RoPE's angles were computed, in turn."""
    grids: list[Grid] = []
    lower = Rope.lower

    def counted(rope: Rope, q: Tensor, k: Tensor, grid: Grid) -> Rotation | None:
        grids.append(grid)
        return lower(rope, q, k, grid)

    monkeypatch.setattr(Rope, "lower", counted)
    return grids


@pytest.mark.usefixtures("entered")
def test_angles_are_kept_for_all_layers(lowered: list[Grid]) -> None:
    rope, layout = Rope(head_dim=8), Layout.sequence(40)
    encoding, q = Encoding.of(rope), torch.randn(1, 2, 40, 8)
    with torch.inference_mode():
        for _ in range(2):
            first = attend(q, q, q, Grid.of(layout, causal=True), encoding, backend="sdpa")
    lowered.clear()
    again = attend(q, q, q.requires_grad_(), Grid.of(layout, causal=True), encoding, backend="sdpa")
    assert not lowered
    torch.testing.assert_close(again, first)
    again.sum().backward()
    q = q.double()
    for at, change in enumerate(
        (
            {},  # another mask, and float64
            {"divisors": (1.0,) * 4},
            {"divisors": (2.0,) * 4},
            {"base": 2 * rope.base},
        )
    ):
        for name, value in change.items():
            setattr(rope, name, value)
        for same in (layout, layout, layout, Layout.sequence(40)):  # equal layouts share them
            attend(q, q, q, Grid.of(same), encoding.double())
        assert len(lowered) == 2 * (at + 1)


@pytest.mark.usefixtures("entered")
def test_results_of_signals_are_those_of_each_call() -> None:
    score, layout = create("alibi", heads=2).score, Layout.sequence(8)
    assert score is not None

    def read(grid: Grid) -> float:
        assert grid.key.signal is not None
        return grid.key.signal.mean().item()

    for signal in (1.0, 2.0):
        grid = Grid.of(layout.with_signal(torch.full((1, 8, 1), signal)))
        assert reused_of_grid(read, "signals", grid=grid, layers=(score,)) == signal


@pytest.mark.usefixtures("entered")
def test_documents_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Grid] = []
    packed = Layout.packed([20, 20])

    def counted(grid: Grid) -> Any:
        calls.append(grid)
        return run_intervals(grid)

    monkeypatch.setattr(offsets, "run_intervals", counted)
    for _ in range(4):
        Offsets.of(Grid.of(packed, causal=True))
    assert len(calls) == 2
    for signal in torch.randn(2, 1, 40, 3):  # of the same tokens, as layers observe them
        Offsets.of(Grid.of(packed.with_signal(signal), causal=True))
    assert len(calls) == 2
    Offsets.of(Grid.of(packed, causal=True, window=3))
    Offsets.of(Grid.of(packed))
    assert len(calls) == 4


@pytest.mark.usefixtures("entered")
def test_constant_tables_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*given: Any, **options: Any) -> Terms:
        calls.append(given)
        return read_terms(*given, **options)

    monkeypatch.setattr(posing, "read_terms", counted)
    layout = Layout.sequence(40)
    for encoding, count in ((create("alibi", heads=2), 4), (create("kerple", heads=2), 6)):
        calls.clear()
        for window in (None, 5, None, 5, None, 5):  # fewer offsets are read behind a window
            grid = Grid.of(layout, causal=True, window=window)
            problem = Call(*torch.randn(3, 1, 2, 40, 8), grid, encoding).problem()
            assert problem.lowered is not None
            record = posing.record_of(problem, Offsets.regular(grid), problem.lowered)
            assert record.terms.bias_by_offset is not None
            assert record.terms.bias_by_offset.shape[1] == (window or 40)
        assert len(calls) == count


def test_visibility_token_by_token_hides_no_offset() -> None:
    grid = Grid.of(Layout.sequence(9), causal=True, window=3)
    assert Offsets.shifted(grid, 0).band == (-2, 0)
    assert Offsets.shifted(grid, 0, masked=False).band == (-8, 8)


def test_given_terms_hold_what_they_are_given() -> None:
    """A group of nothing, one of a table and rows of values, and one of values alone."""
    grid, rows = Grid.of(Layout.sequence(5)), torch.randn(1, 9, 4)

    def bucket(offset: Tensor) -> Tensor:
        return offset[..., 0].long() + 4

    nothing = BucketedTerms(bucket)
    both = BucketedTerms(bucket, table=torch.randn(2, 9), value=rows)
    values = BucketedTerms(bucket, value=rows)
    assert given_encoding([nothing]).score is None
    assert given_encoding([nothing, values]).score is None
    score, value = given_encoding([nothing, both]).score, given_encoding([both]).value
    assert score is not None
    assert value is not None
    q = torch.randn(1, 2, 5, 4)
    index = bucket(grid.offset)[0]
    torch.testing.assert_close(score(q, q, grid, scale=1.0), both.table[None, :, index])  # type: ignore[index]
    weights = torch.rand(1, 2, 5, 5)
    expected = (weights.unsqueeze(-1) * rows[0, index]).sum(3)
    torch.testing.assert_close(value(weights, grid), expected)


@pytest.mark.usefixtures("entered")
def test_positions_keep_their_gradients_after_calls_without() -> None:
    positions = torch.arange(40.0).view(1, 40, 1).requires_grad_()
    grid = Grid.of(Layout.sequence(40).with_positions(positions), causal=True)
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    encoding = create("rope", head_dim=8)
    with torch.no_grad():
        attend(q, k, v, grid, encoding, backend="sdpa")
    output = attend(q, k, v, grid, encoding, backend="sdpa")
    (gradient,) = torch.autograd.grad(output.square().sum(), positions)
    assert gradient.abs().max() > 1e-4


@pytest.mark.usefixtures("entered")
def test_nothing_of_a_captured_graph_is_kept(
    lowered: list[Grid], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, q, encoding = (
        Layout.sequence(40),
        torch.randn(1, 2, 40, 8),
        Encoding.of(Rope(head_dim=8)),
    )
    for captured, count in ((True, 1), (True, 2), (False, 3), (False, 4), (False, 4)):
        monkeypatch.setattr(prepared, "_is_capturing", lambda captured=captured: captured)
        attend(q, q, q, Grid.of(layout), encoding, backend="sdpa")
        assert len(lowered) == count
