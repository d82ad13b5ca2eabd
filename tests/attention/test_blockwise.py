"""Blocks against the definition: values, all gradients, memory, dropout, compiling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.blockwise import definition, offsets
from posenc.attention.backends.blockwise.offsets import hidden_pairs, seen_keys, skew, unskew
from posenc.attention.backends.native.build import missing
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.record import (
    SCHEMA,
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
    flatten,
)
from posenc.attention.problem.terms import Terms
from tests.attention.comparing import compare, draw_for, results
from tests.support.exhaustive import in_turn
from tests.support.watching import LargestTensor

METHODS = (
    "nope",
    "alibi",
    "t5",
    "kerple",
    "shaw",
    "contextual",
    "deberta",
    "transformer_xl",
    "tupe",
    "rope+t5",
)

GRIDS = {
    "square": Grid.of(Layout.sequence(97)),
    "causal": Grid.of(Layout.sequence(97), causal=True),
    "window": Grid.of(Layout.sequence(97), window=9),
    "causal window": Grid.of(Layout.sequence(97), causal=True, window=21),
    "chunk": Grid(Layout.sequence(40, 57), Layout.sequence(97), causal=True),
    "later keys": Grid(Layout.sequence(30), Layout.sequence(97, 20)),
    "one": Grid(Layout.sequence(1, 96), Layout.sequence(97), causal=True),
    "empty rows": Grid(Layout.sequence(40), Layout.sequence(57, 11), causal=True),
    "packed": Grid.of(Layout.packed([40, 1, 56]), causal=True),
    "padded": Grid.of(Layout.padded([97, 30], side="left"), causal=True),
    "irregular": Grid.of(Layout.at(torch.arange(97.0) * 1.5), causal=True),
}


@pytest.fixture(params=["small blocks", "usual blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a short text has all kinds of them, then the real ones."""
    if request.param == "small blocks":
        monkeypatch.setattr(offsets, "ROWS", 13)
        monkeypatch.setattr(offsets, "BUDGET", {"cpu": 4000})
        monkeypatch.setattr(definition, "BUDGET", 3000)


def in_blocks_of_both_sizes(grids: Iterable[str], usual: Iterable[str]) -> list[tuple[str, str]]:
    """Several small blocks meet all grids; of the usual ones there is one, which meets a few."""
    return [*(("small blocks", where) for where in grids), *(("usual blocks", x) for x in usual)]


def make(name: str, *, causal: bool) -> Encoding:
    torch.manual_seed(1)
    options = {"max_distance": 7} if name in {"shaw", "contextual"} else {}
    if name in {"t5", "rope+t5"}:
        options = {"max_distance": 12, "buckets": 16}
    encoding = posenc.create(
        name, dim=48, heads=6, head_dim=8, max_length=200, causal=causal, **options
    ).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return encoding


def inputs(grid: Grid, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return draw_for(grid, heads=6, groups=3, width=8, dtype=dtype)


def check(encoding: Encoding, grid: Grid, tensors: Sequence[Tensor], tolerance: float) -> None:
    """Compare with the definition's output and all gradients, also of tensors behind q, k and v."""
    options: dict[str, Any] = {"wanted": tensors[3:], "lse": False, "tolerance": tolerance}
    compare(tensors[:3], grid, encoding, "blockwise", **options)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("name", "_blocks", "where"),
    in_turn(4, METHODS, in_blocks_of_both_sizes(GRIDS, ("square", "causal window", "padded"))),
    indirect=["_blocks"],
)
def test_equals_the_definition(name: str, where: str) -> None:
    grid = GRIDS[where]
    encoding, tensors = make(name, causal=grid.causal), inputs(grid)
    # Biases are made from positions in float32, and so are gradients of what makes them.
    check(encoding, grid, tensors, 2e-6)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("name", "_blocks", "where"),
    in_turn(
        2,
        ["cope", "fire", "t5+sinusoidal", "stick_breaking"],
        in_blocks_of_both_sizes(
            ("causal", "causal window", "chunk", "packed", "padded"), ("causal window", "padded")
        ),
    ),
    indirect=["_blocks"],
)
def test_without_structured_form_by_definition(name: str, where: str) -> None:
    grid = GRIDS[where]
    encoding, tensors = make(name, causal=True), inputs(grid)
    if name != "t5+sinusoidal":
        how = explain(*tensors, grid, encoding, backend="blockwise").how
        assert how == "the definition, a block of queries at a time (memory linear in the length)"
    # Offsets are float32, and with them what their function's parameters get.
    check(encoding, grid, tensors, 1e-5)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("name", "_blocks", "where"),
    in_turn(
        2,
        ["path", "forgetting", "cable", "grape_additive"],
        in_blocks_of_both_sizes(
            ("causal", "causal window", "packed", "padded", "irregular"), ("causal", "packed")
        ),
    ),
    indirect=["_blocks"],
)
def test_sums_over_tokens_between(name: str, where: str) -> None:
    """Of PaTH, by transforms of 64 keys each, with the gradients of signals and parameters."""
    encoding, grid = make(name, causal=True), GRIDS[where]
    x = torch.randn(2, 97, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layout = encoding.observe(x, grid.query)
    assert layout.signal is not None
    signal = layout.signal.detach().requires_grad_()
    seen = Grid.of(replace(layout, signal=signal), causal=True, window=grid.window)
    tensors = [*inputs(seen), signal]
    check(encoding, seen, tensors, 1e-6)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("first", [1, 57, 64, 90])
@pytest.mark.parametrize("name", ["path", "forgetting", "grape_additive"])
def test_sums_up_to_queries_after_a_past(name: str, first: int) -> None:
    """Whose own keys lie in any block of PaTH's transforms."""
    encoding, past = make(name, causal=True), GRIDS["causal"].query
    x = torch.randn(2, 97, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    key = encoding.observe(x, past)
    grid = Grid(key.slice(first, 97), key, causal=True)
    check(encoding, grid, inputs(grid), 1e-6)


@pytest.mark.parametrize(
    ("sides", "name", "frozen"),
    in_turn(
        3,
        {"image": [7, 9], "row": [1, 13], "column": [13, 1], "large": [20, 17]},
        ["swin", "swin_v2", "irpe"],
        [False, True],
    ),
)
def test_tables_between_images(
    name: str, sides: list[int], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definition, "BUDGET", 50_000)
    options = {"irpe": {"mode": "bias"}}.get(name, {"window": (20, 20)})
    encoding = posenc.create(name, dim=48, heads=6, head_dim=8, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
    encoding.requires_grad_(not frozen)
    grid = Grid.of(Layout.image(*sides))
    check(encoding, grid, inputs(grid), 1e-6)  # the network of swin_v2 reads offsets in float32


def test_frozen_tables_too() -> None:
    for where in ("square", "causal", "window"):
        encoding = make("t5", causal=GRIDS[where].causal).requires_grad_(False)
        check(encoding, GRIDS[where], inputs(GRIDS[where]), 1e-9)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_gradients_with_dropout_are_of_what_was_computed(name: str) -> None:
    """The same weights are dropped forward and backward: seen by finite differences."""
    grid = GRIDS["causal"]
    encoding, tensors = make(name, causal=True), inputs(grid)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        output = attend(q, k, v, grid, encoding, backend="blockwise", dropout=0.4)
        return (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()

    gradients = torch.autograd.grad(loss(*tensors), tensors)
    for index, gradient in enumerate(gradients):
        step = torch.zeros_like(tensors[index])
        step[1, 1, 5] = 1e-5
        moved = [x + step if i == index else x for i, x in enumerate(tensors)]
        back = [x - step if i == index else x for i, x in enumerate(tensors)]
        slope = (loss(*moved) - loss(*back)) / 2e-5
        torch.testing.assert_close(slope, gradient[1, 1, 5].sum(), atol=1e-5, rtol=1e-5)
    assert loss(*tensors) == loss(*tensors)


@pytest.mark.parametrize("name", ["shaw", "cope"])
def test_dropout_is_the_same_for_any_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, (q, k, v) = make(name, causal=True), inputs(GRIDS["causal"])
    outputs = []
    for budget in (3000, 2**22):
        monkeypatch.setattr(offsets, "BUDGET", {"cpu": budget})
        monkeypatch.setattr(definition, "BUDGET", budget)
        torch.manual_seed(0)
        outputs.append(attend(q, k, v, GRIDS["causal"], encoding, backend="blockwise", dropout=0.3))
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)
    full = attend(q, k, v, GRIDS["causal"], encoding, backend="blockwise")
    assert (outputs[0] - full).abs().max() > 0.1


def test_dropout_drops_its_share() -> None:
    grid = Grid.of(Layout.sequence(300))
    q, k = torch.zeros(1, 2, 300, 8), torch.zeros(1, 2, 300, 8)
    v = torch.ones(1, 2, 300, 8)
    output = attend(q, k, v, grid, Encoding(), backend="blockwise", dropout=0.3)
    assert output.mean().item() == pytest.approx(1.0, abs=0.01)
    assert output.std().item() == pytest.approx(math.sqrt(0.3 / 0.7 / 300), rel=0.2)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", ["nope", "cope"])
def test_masks_of_dropout_are_independent(name: str) -> None:
    """Of all batch rows, heads and queries: which weights are left, as values of ones tell."""
    grid = Grid(Layout.sequence(40, 560), Layout.sequence(600), causal=True)
    q, k = torch.zeros(2, 3, 40, 8), torch.zeros(2, 3, 600, 8)
    v, encoding = torch.eye(600).expand(2, 3, -1, -1), posenc.create(name, head_dim=8)
    output = attend(q, k, v, grid, encoding, backend="blockwise", dropout=0.5)
    rows = output.detach().flatten(0, 2)[:, :560]
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.4


@pytest.mark.parametrize("name", ["t5", "shaw", "deberta", "cope", "path"])
def test_memory_does_not_grow_with_the_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 1500
    monkeypatch.setattr(definition, "BUDGET", 2**18)
    layout, encoding = Layout.sequence(length), make(name, causal=True).float()
    if name == "path":
        layout = encoding.observe(torch.randn(1, length, 48), layout)
    grid = Grid.of(layout, causal=True)
    tensors = [x[:1].detach().requires_grad_() for x in inputs(grid, dtype=torch.float32)]
    with LargestTensor() as memory:
        attend(*tensors, grid, encoding, backend="blockwise").sum().backward()
    assert memory.most <= 2**20
    assert memory.most < 6 * length * length / 10


def test_the_same_twice() -> None:
    for name in ("t5", "shaw", "transformer_xl"):
        encoding, tensors = make(name, causal=True), inputs(GRIDS["causal"])
        first, second = (
            results(tensors, GRIDS["causal"], encoding, "blockwise", lse=False) for _ in range(2)
        )
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "name", ["t5", "shaw", pytest.param("transformer_xl", marks=pytest.mark.exhaustive)]
)
def test_compiled_equals_eager(name: str) -> None:
    encoding = make(name, causal=True).float()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grid = Grid.of(Layout.sequence(q.shape[2]), causal=True)
        return attend(q, k, v, grid, encoding, backend="blockwise")

    # Where the width is dynamic too, what depends on it is traced twice.
    dynamic = True if name == "t5" else None
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (97, 41):
        grid = Grid.of(Layout.sequence(length), causal=True)
        tensors = inputs(grid, dtype=torch.float32)
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(compiled(*tensors), step(*tensors))
        got = torch.autograd.grad(compiled(*tensors).sin().sum(), tensors)
        expected = torch.autograd.grad(step(*tensors).sin().sum(), tensors)
        torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by PyTorch 2.15's opcheck itself
@pytest.mark.parametrize(("causal", "heads_last"), [(1, False), (0, True)])
def test_the_operators_are_well_registered(causal: int, heads_last: bool) -> None:
    """Shapes and strides are what compilers are told."""
    q, k, v = torch.randn(3, 2, 6, 97, 8)
    if heads_last:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    bias = torch.randn(6, 193)
    wants = [True, True, True, bool(causal)]
    for x, want in zip((q, k, v, bias), wants, strict=True):
        x.requires_grad_(want)
    record = KernelProblem(
        *(q, k, v, 0.4, Terms(bias_by_offset=bias, first=-96), PairTerm()),
        *(Geometry(0, -96, 0 if causal else 96), SegmentMask(), RotaryFactors()),
    )
    flat = tuple(flatten(record, SCHEMA))
    torch.library.opcheck(torch.ops.posenc.blockwise.default, flat)
    with torch.no_grad():
        results = [torch.randn_like(q), *torch.ops.posenc.blockwise(*flat)]
        tensors = [x.detach() for x in flat[0]]
    back = (results, tensors, *flat[1:], wants, False)
    torch.library.opcheck(torch.ops.posenc.blockwise_backward.default, back)


def test_under_checkpointing() -> None:
    encoding, tensors = make("shaw", causal=True), inputs(GRIDS["causal"])

    def step(*given: Tensor) -> Tensor:
        return attend(*given, GRIDS["causal"], encoding, backend="blockwise")

    saved = checkpoint(step, *tensors, use_reentrant=False)
    got = torch.autograd.grad(saved.sin().sum(), tensors)
    expected = torch.autograd.grad(step(*tensors).sin().sum(), tensors)
    torch.testing.assert_close(got, expected)


def test_auto_takes_it_where_the_definition_would_take_too_much() -> None:
    encoding = posenc.create("shaw", head_dim=8)
    many, packed_by = ("blockwise", "sdpa") if missing() else ("native", "native")
    for length, backend in ((60, "reference"), (2048, many)):
        grid = Grid.of(Layout.sequence(length), causal=True)
        told = explain(*inputs(grid, dtype=torch.float32), grid, encoding)
        assert told.backend == backend
    packed = Grid.of(Layout.packed([1000, 1048]), causal=True)
    told = explain(*inputs(packed, dtype=torch.float32), packed, posenc.create("rope", head_dim=8))
    assert told.backend == packed_by


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("shift", [-40, -7, 0, 4, 25])
def test_a_block_looks_at_the_keys_that_it_sees(
    causal: bool, window: int | None, shift: int
) -> None:
    queries, keys, cpu = 23, 31, torch.device("cpu")
    grid = Grid(Layout.sequence(queries, 50), Layout.sequence(keys, 50 + shift), causal, window)
    band = Geometry(shift, *Offsets.regular(grid).band)
    for begin in range(0, queries, 8):
        rows = slice(begin, min(queries, begin + 8))
        visible = grid.visible[0, 0, rows]
        seen, places = seen_keys(band, rows, keys), visible.any(0).nonzero().flatten()
        assert seen.stop > seen.start
        if len(places):
            assert (seen.start, seen.stop) == (int(places[0]), int(places[-1]) + 1)
        hidden = hidden_pairs(band, rows, seen, cpu)
        shown = torch.ones_like(visible[:, seen]) if hidden is None else ~hidden
        assert torch.equal(shown, visible[:, seen])
        assert (hidden is None) == bool(visible[:, seen].all())


def test_rows_by_offset_are_shifted_one_by_one() -> None:
    """Two queries, three keys, worked by hand."""
    by_offset = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]])
    assert skew(by_offset, 3).tolist() == [[[2, 3, 4], [5, 6, 7]]]
    assert unskew(skew(by_offset, 3)).tolist() == [[[0, 2, 3, 4], [5, 6, 7, 0]]]
    assert unskew(skew(by_offset[:, :1], 4)).tolist() == [[[1, 2, 3, 4]]]
