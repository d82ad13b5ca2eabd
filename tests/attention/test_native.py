"""The compiled kernels against the reference, in values and in all gradients."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import posenc
from posenc.attention import attend, explain
from posenc.attention.backends.native import splitting
from posenc.attention.backends.native.posing import read_visible_terms
from posenc.attention.call import Call
from posenc.attention.problem.offsets import Offsets
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm, TokenTableProduct
from posenc.encodings.score import tupe
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built, cast, compare, draw, results
from tests.support.exhaustive import in_turn
from tests.testing.rounding import rounded_logits
from tests.testing.tolerances import FACTOR, agree_within

pytestmark = [built, pytest.mark.usefixtures("poisoned")]

HEADS, WIDTH, DIM = 4, 24, 32

METHODS: dict[str, dict[str, object]] = {
    "nope": {},
    "rope": {"head_dim": WIDTH},
    "alibi": {"heads": HEADS},
    "t5": {"heads": HEADS},
    "shaw": {"head_dim": WIDTH, "max_distance": 5},
    "transformer_xl": {"dim": DIM, "heads": HEADS, "head_dim": WIDTH},
    "deberta": {"dim": DIM, "heads": HEADS, "head_dim": WIDTH, "max_distance": 40, "buckets": 16},
    "tupe": {"dim": DIM, "heads": HEADS, "head_dim": WIDTH, "max_length": 2000},
    "contextual": {"head_dim": WIDTH},
    "fire": {"heads": HEADS, "hidden": 9, "threshold": 20.0},
    "cope": {"head_dim": WIDTH, "max_count": 20},
    "dape": {"heads": HEADS, "hidden": 7},
    "dape, of alibi": {"heads": HEADS, "bias": "alibi"},
    "grape_additive": {"dim": DIM, "heads": HEADS},
    "grape_additive, wide": {"dim": DIM, "heads": HEADS, "width": 18},
    "path": {"dim": DIM, "heads": HEADS, "head_dim": WIDTH, "rank": 6},
    "stick_breaking": {},
    "stick_breaking, no remainder": {"remainder": "none"},
}

SIZES = {
    f"{q} of {k}": [q, k] for q, k in ((1, 1), (1, 65), (63, 63), (65, 65), (30, 65), (40, 600))
}
"""Queries, which are the last, and keys."""

HALVES = [torch.bfloat16, torch.float16]


def last(queries: int, keys: int, **options: Any) -> Grid:
    """The last queries of a text, after all of its keys."""
    layout = Layout.sequence(keys)
    return Grid(layout.slice(keys - queries, keys), layout, **options)


def make(name: str, *, causal: bool = False) -> Encoding:
    torch.manual_seed(3)
    options = METHODS.get(name, {"dim": DIM, "heads": HEADS})
    one_way = {"causal": causal} if name in ("t5", "tupe") else {}
    encoding = posenc.create(name.partition(",")[0], **options, **one_way)
    for key, parameter in encoding.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("scale" in key or "stretch" in key), std=0.4)
    return encoding


def observed(encoding: Encoding, grid: Grid, x: Tensor) -> Grid:
    """The grid with signals of its last tokens."""
    keys = encoding.observe(x[:, -grid.key.length :], grid.key)
    queries = encoding.observe(x[:, -grid.query.length :], grid.query)
    return Grid(queries, keys, grid.causal, grid.window)


def check(
    name: str,
    grid: Grid,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 3e-5,
    rows: int = 2,
) -> None:
    """Compare output, LSE and all gradients with those of the definition in float64."""
    encoding, rows = make(name, causal=grid.causal), max(rows, grid.query.batch)
    given = cast(draw(grid.query.length, grid.key.length, rows=rows), dtype)
    signals = torch.randn(rows, max(grid.query.length, grid.key.length), DIM)

    def run(kind: torch.dtype, backend: str) -> list[Tensor]:
        encoding.to(wide := torch.promote_types(kind, torch.float32))
        return results(
            cast(given, kind), observed(encoding, grid, signals.to(wide)), encoding, backend
        )

    def definition() -> list[Tensor]:
        with rounded_logits(torch.finfo(dtype).eps, 0):
            return run(dtype, "reference")

    found = [run(torch.float64, "reference"), run(dtype, "native")]
    bounds = [tolerance] * len(found[0])
    if dtype in HALVES:
        for back, (key, _) in enumerate(reversed(list(encoding.named_parameters())), 1):
            if key.endswith("output.bias"):  # zero but for the rounding of the outputs
                bounds[-back] = 0.1
    agree_within(bounds, found[1], found[0], definition)


def ways(name: str) -> tuple[bool, ...]:
    """Whether grids are causal, of those that a method takes."""
    return (True,) if make(name).causal_only else (False, True)


@pytest.mark.parametrize(("name", "size"), in_turn(3, list(METHODS), SIZES))
def test_values_and_gradients(name: str, size: list[int]) -> None:
    for causal in ways(name):
        check(name, last(*size, causal=causal))


@pytest.mark.parametrize("name", METHODS)
def test_windows_documents_and_padding(name: str) -> None:
    for causal in ways(name):
        check(name, Grid.of(Layout.sequence(70, start=7), causal=causal, window=6))
        check(name, Grid.of(Layout.packed([20, 1, 44]), causal=causal))
        check(name, Grid.of(Layout.padded([65, 20], side="left"), causal=causal, window=9))
        check(name, Grid.of(Layout.padded([40, 65]), causal=causal))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "path"])
def test_queries_that_see_no_key(name: str) -> None:
    check(name, Grid(Layout.sequence(20), Layout.sequence(30, start=12), causal=True))
    check(name, Grid(Layout.sequence(60, start=5), Layout.sequence(40), causal=True, window=1))
    if not make(name).causal_only:
        check(name, Grid(Layout.sequence(20), Layout.sequence(30, start=60), window=4))


HALF_GRIDS = {
    "1 of 1": [last(1, 1)],
    "63 of 63": [last(63, 63), last(63, 63, causal=True, window=33)],
    "65 of 65": [last(65, 65), last(65, 65, causal=True)],
    "30 of 65": [last(30, 65), last(30, 65, causal=True, window=33)],
    "33 of 600": [last(33, 600), last(40, 600, causal=True, window=33)],
    "window": [last(150, 150, causal=True, window=20), last(150, 150, window=20)],
    "packed": [Grid.of(Layout.packed([20, 1, 44]), causal=True)],
    "padded": [Grid.of(Layout.padded([65, 20], side="left"), causal=True)],
}


@pytest.mark.parametrize(("name", "grids"), in_turn(4, list(METHODS), HALF_GRIDS))
def test_half_precision(name: str, grids: list[Grid]) -> None:
    """By AMX where the processor has it."""
    # Rows of gradients sum to 0 but for the rounding of outputs, which reaches networks too.
    tolerance = 0.1 if name.startswith("dape") else 0.06
    for grid in grids:
        if grid.causal or not make(name).causal_only:
            check(name, grid, dtype=torch.bfloat16, tolerance=tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_float16(name: str) -> None:
    check(name, last(65, 65, causal=True), dtype=torch.float16, tolerance=0.04)


MANY = {"1100 of 1100": [1100, 1100], "300 of 1100": [300, 1100]}


@pytest.mark.parametrize(
    ("name", "size"),
    in_turn(1, ["shaw", "deberta", "t5", "transformer_xl", *list(METHODS)[9:]], MANY),
)
def test_many_tiles(name: str, size: list[int]) -> None:
    check(name, last(*size, causal=True), dtype=torch.float64, tolerance=1e-9, rows=1)


@pytest.mark.parametrize("name", ["transformer_xl", "tupe"])
@pytest.mark.parametrize(
    ("size", "threads"), [((65, 65), 1), ((65, 65), 3), ((30, 65), 3), ((40, 600), 3)]
)
def test_rows_of_few_heads_at_a_time(
    size: tuple[int, int], threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in long sequences; TUPE's positions in pieces too."""
    for module in (splitting, tupe):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(tupe, "ROWS", 24)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for causal, window in ((False, None), (True, None), (True, 9)):
        grid = last(*size, causal=causal, window=window)
        check(name, grid)
        check(name, grid, dtype=torch.bfloat16, tolerance=0.04)
    encoding, inputs = make(name), draw(65, 65)
    assert (
        "few heads"
        in explain(*inputs, Grid.of(Layout.sequence(65)), encoding, backend="native").how
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_equal_logits(dtype: torch.dtype) -> None:
    """The LSE of n logits 0 is log(n); NaN of a query that is not a number."""
    q, v = torch.zeros(2, 1, 1, 700, 16, dtype=dtype)
    q[:, :, 3] = torch.nan
    grid = Grid.of(Layout.sequence(700), causal=True)
    _, lse = attend(q, torch.zeros_like(q), v, grid, Encoding(), backend="native", return_lse=True)
    expected = torch.arange(1.0, 701.0, dtype=torch.float64).log()
    expected[3] = torch.nan
    rtol = FACTOR * torch.finfo(lse.dtype).eps
    torch.testing.assert_close(lse.flatten().double(), expected, rtol=rtol, atol=0, equal_nan=True)


def test_results_are_the_same_for_any_number_of_threads_and_in_many_at_once() -> None:
    grid = Grid.of(Layout.sequence(600))
    inputs = draw(600, 600, heads=2, groups=1, rows=1)
    encoding = posenc.create("shaw", head_dim=24, max_distance=30)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(inputs, grid, encoding, "native")
        torch.set_num_threads(3)
        found: list[list[Tensor]] = []

        def work() -> None:
            found.append(results(inputs, grid, encoding, "native"))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert len(found) == 8
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, alone, strict=True))


def test_a_forked_process_computes_too() -> None:
    script = (
        "import multiprocessing, torch, posenc\n"
        "from posenc import Grid, Layout, attend\n"
        "torch.set_num_threads(2)\n"
        "grid = Grid.of(Layout.sequence(300))\n"
        "q = torch.randn(1, 4, 300, 16)\n"
        "def run(_=None): return attend(q, q, q, grid, posenc.create('nope'), backend='native')\n"
        "expected = run()\n"
        "def child(): raise SystemExit(0 if torch.equal(run(), expected) else 3)\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join(60)\n"
        "print(process.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "0", done.stderr


def test_compiles() -> None:
    encoding, grid = make("shaw"), Grid.of(Layout.sequence(33), causal=True)
    inputs = draw(33, 33)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="native")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    for one, other in zip(got, torch.autograd.grad(run(*inputs).sin().sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_logits_of_a_single_key_have_no_gradient(name: str) -> None:
    """Its weight is 1; rounding that is summed over all tokens would not be small."""
    grid = Grid.of(Layout.sequence(300), causal=True, window=1)
    q, k, v = draw(300, 300)
    encoding = make(name, causal=True)
    output = attend(q, k, v, grid, encoding, backend="native")
    table = next(iter(encoding.score.parameters())) if encoding.score is not None else q
    gradients = torch.autograd.grad(output.sin().sum(), (q, k, table), materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("window", [None, 7])
def test_buckets_reach_the_pairs_that_are_hidden(groups: int, window: int | None) -> None:
    """Strips of keys' terms read them, in the backward pass too."""
    grid = Grid.of(Layout.sequence(322), causal=True, window=window)
    encoding = make("deberta")
    q, k, v = draw(322, 322, heads=4, groups=groups)
    problem = Call(q, k, v, grid, encoding).problem().rotated
    assert problem.lowered is not None
    offsets = Offsets.regular(grid)
    assert offsets.reach == (-321, 321)
    read = read_visible_terms(problem.lowered, problem, offsets)
    assert read.first == -321
    assert read.bucket is not None
    assert len(read.bucket) == 643
    check("deberta", grid)


class TwoMaps(ScoreTerm):
    """``s_ij += q_i · (a[Δ] + b[±Δ])``, offsets clipped to the rows of each table."""

    def __init__(self, *counts: int, sign: int = 1) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(1, count, 24) for count in counts)
        self.signs = (1, sign)

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        terms = self.lower(q, k, grid, scale=scale)
        return sum(gather_rows(q, t.left.rows, t.bucket(grid.offset)) for t in terms)  # type: ignore[misc, union-attr]

    def lower(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> tuple[BucketedTerms, ...]:
        return tuple(
            BucketedTerms(
                lambda offset, sign=sign, last=rows.shape[1] - 1: (  # type: ignore[misc]
                    (sign * offset[..., 0].long()).clamp(0, last)
                ),
                left=TokenTableProduct(q, rows),
            )
            for rows, sign in zip(self.tables, self.signs, strict=True)
        )


def test_maps_of_several_tables_that_agree_where_pairs_are_visible() -> None:
    torch.manual_seed(3)
    compare(draw(30, 30), Grid.of(Layout.sequence(30), window=1), Encoding(score=TwoMaps(3, 7)))


def test_maps_of_tables_with_as_many_rows_are_told_apart() -> None:
    torch.manual_seed(3)
    compare(draw(30, 30), Grid.of(Layout.sequence(30)), Encoding(score=TwoMaps(7, 7, sign=-1)))


@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_modes_see_the_operator(name: str) -> None:
    """Calls that nothing observes skip PyTorch's dispatcher; those in a mode go through it."""
    seen: list[str] = []

    class Names(TorchDispatchMode):
        """Keeps the names of all operators."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    call = draw(300, 300), Grid.of(Layout.sequence(300)), make(name), "native"
    plain = results(*call)
    with Names():
        observed = results(*call)
    assert {"posenc::native", "posenc::native_backward"} <= set(seen)
    for one, other in zip(plain, observed, strict=True):
        assert torch.equal(one, other)
