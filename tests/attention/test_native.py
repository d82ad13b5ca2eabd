"""The compiled kernels in threads, processes, graphs and modes, and at sums with exact values.

The laws of backends and ``attention_fuzz`` hold them to the reference.
"""

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
from posenc.attention import attend
from posenc.attention.backends.native.posing import read_visible_terms
from posenc.attention.call import Call
from posenc.attention.problem.offsets import Offsets
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm, TokenTableProduct
from posenc.encodings.common.buckets import gather_rows
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built, compare, draw, results
from tests.testing.tolerances import FACTOR

pytestmark = [built, pytest.mark.usefixtures("poisoned")]

HEADS, WIDTH, DIM = 4, 24, 32

PAIRS: dict[str, dict[str, object]] = {
    "fire": {"hidden": 9, "threshold": 20.0},
    "cope": {"max_count": 20},
    "dape": {"hidden": 7},
    "dape, of alibi": {"bias": "alibi"},
    "grape_additive": {},
    "grape_additive, wide": {"width": 18},
    "path": {"rank": 6},
    "stick_breaking": {},
    "stick_breaking, no remainder": {"remainder": "none"},
}
"""Methods whose terms of pairs are not of the structured form, with their options."""


def last(queries: int, keys: int, **options: Any) -> Grid:
    """The last queries of a text, after all of its keys."""
    layout = Layout.sequence(keys)
    return Grid(layout.slice(keys - queries, keys), layout, **options)


def make(name: str, *, causal: bool = False) -> Encoding:
    torch.manual_seed(3)
    context: dict[str, Any] = {"dim": DIM, "heads": HEADS, "head_dim": WIDTH, "causal": causal}
    encoding = posenc.create(name.partition(",")[0], **context, **PAIRS.get(name, {}))
    for key, parameter in encoding.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("scale" in key or "stretch" in key), std=0.4)
    return encoding


def observed(encoding: Encoding, grid: Grid, x: Tensor) -> Grid:
    """The grid with signals of its last tokens."""
    keys = encoding.observe(x[:, -grid.key.length :], grid.key)
    queries = encoding.observe(x[:, -grid.query.length :], grid.query)
    return Grid(queries, keys, grid.causal, grid.window)


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
    compare(draw(322, 322), grid, encoding, tolerance=3e-5)


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


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 1) for name in ("t5", "fire", "shaw", "grape_additive")), ("dape", 4)],
)
def test_threads_add_to_gradients_of_their_own(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: sums that two threads shared would depend on their order."""
    torch.manual_seed(7)
    encoding = posenc.create(name, dim=16, heads=2, head_dim=8)
    inputs = draw(600, 600, heads=2, rows=rows, width=8)
    layout = Layout.sequence(600)
    found = []
    for threads in (1, 3):  # of the kernels alone
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        grid = Grid.of(
            encoding.observe(torch.ones(rows, 600, 16), layout), causal=encoding.causal_only
        )
        found.append(results(inputs, grid, encoding, "native"))
    assert all(torch.equal(one, many) for one, many in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_even(dtype: torch.dtype) -> None:
    """Means of two values, half of which lie halfway between two numbers."""
    torch.manual_seed(5)
    q, k = (torch.zeros(1, 1, length, 8, dtype=dtype) for length in (40, 2))
    v = torch.randn(1, 1, 2, 500).to(dtype)
    grid = Grid(Layout.sequence(40), Layout.sequence(2))
    got = attend(q, k, v, grid, Encoding(), backend="native")
    assert torch.equal(got, v.float().mean(2, keepdim=True).to(dtype).expand_as(got))
