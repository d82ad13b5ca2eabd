"""The compiled kernels against the reference, in values and in all gradients."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import posenc
from posenc.attention import attend, explain
from posenc.attention.backends.native import build as building
from posenc.attention.backends.native import splitting
from posenc.attention.backends.native.posing import read_visible_terms
from posenc.attention.call import Call
from posenc.attention.problem.offsets import Offsets
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm, TokenTableProduct
from posenc.encodings.common import pieces
from posenc.encodings.common.buckets import gather_rows
from posenc.encodings.score import tupe
from posenc.grid import Grid
from posenc.layout import Layout
from tests.testing.rounding import rounded_logits
from tests.testing.tolerances import FACTOR, agree_within

built = pytest.mark.skipif(
    building.missing() is not None, reason=f"kernels are not built; {building.COMMAND}"
)

pytestmark = pytest.mark.usefixtures("poisoned")

METHODS: dict[str, dict[str, object]] = {
    "nope": {},
    "rope": {"head_dim": 24},
    "alibi": {"heads": 4},
    "t5": {"heads": 4},
    "shaw": {"head_dim": 24, "max_distance": 5},
    "transformer_xl": {"dim": 32, "heads": 4, "head_dim": 24},
    "deberta": {"dim": 32, "heads": 4, "head_dim": 24, "max_distance": 40, "buckets": 16},
    "tupe": {"dim": 32, "heads": 4, "head_dim": 24, "max_length": 2000},
    "contextual": {"head_dim": 24},
}


def _encoding(name: str, *, causal: bool = False) -> Encoding:
    torch.manual_seed(3)
    one_way = {"causal": causal} if name in ("t5", "tupe") else {}
    encoding = posenc.create(name, **METHODS[name], **one_way)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return encoding


def _inputs(
    queries: int, keys: int, *, heads: int = 4, groups: int = 2, rows: int = 2, width: int = 24
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    shapes = ((heads, queries), (groups, keys), (groups, keys))
    q, k, v = (torch.randn(rows, n, size, width, requires_grad=True) for n, size in shapes)
    return q, k, v


def _both(
    inputs: tuple[Tensor, Tensor, Tensor], grid: Grid, encoding: Encoding, backend: str
) -> list[Tensor]:
    """Output, LSE and all gradients."""
    wanted = [*inputs, *encoding.parameters()]
    output, lse = attend(*inputs, grid, encoding, backend=backend, return_lse=True)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    found = torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
    gradients = [
        torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
    ]
    return [output, lse, *gradients]


def _agree(got: list[Tensor], expected: list[Tensor], tolerance: float = 2e-5) -> None:
    for one, other in zip(got, expected, strict=True):
        bound = tolerance * max(1.0, float(other.detach().nan_to_num(neginf=0.0).abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=bound, check_dtype=False)


def _check(
    name: str, grid: Grid, *, dtype: torch.dtype = torch.float32, tolerance: float = 2e-5
) -> None:
    encoding = _encoding(name, causal=grid.causal)
    rows = max(2, grid.query.batch)
    inputs = _inputs(grid.query.length, grid.key.length, rows=rows)
    wide = encoding.double()
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = _both((doubles[0], doubles[1], doubles[2]), grid, wide, "reference")
    encoding = wide.to(torch.promote_types(dtype, torch.float32))
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    got = _both((q, k, v), grid, encoding, "native")

    def definition() -> list[Tensor]:
        with rounded_logits(torch.finfo(dtype).eps, 0):
            return _both((q, k, v), grid, encoding, "reference")

    agree_within([tolerance] * len(got), got, expected, definition)


@built
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 65), (63, 63), (65, 65), (30, 65), (40, 600)])
@pytest.mark.parametrize("name", METHODS)
def test_values_and_gradients(name: str, size: tuple[int, int], causal: bool) -> None:
    keys = Layout.sequence(size[1])
    _check(name, Grid(keys.slice(size[1] - size[0], size[1]), keys, causal=causal))


@built
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(63, 63), (65, 65), (30, 65), (40, 600)])
@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_within_windows(name: str, size: tuple[int, int], causal: bool) -> None:
    """By AMX where the processor has it."""
    keys = Layout.sequence(size[1])
    grid = Grid(keys.slice(size[1] - size[0], size[1]), keys, causal, 33 if causal else None)
    _check(name, grid, dtype=torch.bfloat16, tolerance=0.06)


@built
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
    monkeypatch.setattr(pieces, "ROWS", 24)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    keys = Layout.sequence(size[1])
    for causal, window in ((False, None), (True, None), (True, 9)):
        grid = Grid(keys.slice(size[1] - size[0], size[1]), keys, causal, window)
        _check(name, grid)
        _check(name, grid, dtype=torch.bfloat16, tolerance=0.04)
    encoding, inputs = _encoding(name), _inputs(65, 65)
    assert (
        "few heads"
        in explain(*inputs, Grid.of(Layout.sequence(65)), encoding, backend="native").how
    )


@built
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


@built
@pytest.mark.parametrize("name", METHODS)
def test_windows_documents_and_padding(name: str) -> None:
    for causal in (False, True):
        _check(name, Grid.of(Layout.sequence(70), causal=causal, window=6))
        _check(name, Grid.of(Layout.packed([20, 1, 44]), causal=causal))
        _check(name, Grid.of(Layout.padded([65, 20], side="left"), causal=causal, window=9))
        _check(name, Grid.of(Layout.padded([40, 65]), causal=causal))


@built
@pytest.mark.parametrize("name", ["shaw", "deberta", "transformer_xl", "t5"])
def test_queries_that_see_no_key(name: str) -> None:
    queries, keys = Layout.sequence(20, start=0), Layout.sequence(30, start=12)
    _check(name, Grid(queries, keys, causal=True))
    _check(name, Grid(queries, Layout.sequence(30, start=60), causal=False, window=4))


@built
@pytest.mark.parametrize("size", [(1100, 1100), (300, 1100)])
@pytest.mark.parametrize("name", ["shaw", "deberta", "t5", "transformer_xl"])
def test_many_tiles(name: str, size: tuple[int, int]) -> None:
    keys = Layout.sequence(size[1])
    encoding = _encoding(name, causal=size[0] == 300).double()
    inputs = _inputs(*size, heads=4, groups=1, rows=1, width=24)
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    grid = Grid(keys.slice(size[1] - size[0], size[1]), keys, causal=size[0] == 300)
    _agree(
        _both((q, k, v), grid, encoding, "native"),
        _both((q, k, v), grid, encoding, "reference"),
        1e-9,
    )


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rope", "t5", "shaw", "deberta"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    _check(name, Grid.of(Layout.sequence(65), causal=True), dtype=dtype, tolerance=0.04)


@built
@pytest.mark.parametrize("name", ["nope", "shaw", "deberta", "transformer_xl", "tupe"])
def test_bfloat16_of_any_shape(name: str) -> None:
    keys = Layout.sequence(600)
    for grid in (
        Grid(keys.slice(567, 600), keys),
        Grid.of(Layout.sequence(1)),
        Grid.of(Layout.sequence(150), window=20),
        Grid.of(Layout.packed([20, 1, 44]), causal=True),
        Grid.of(Layout.padded([65, 20], side="left")),
    ):
        _check(name, grid, dtype=torch.bfloat16, tolerance=0.06)


@built
def test_rows_of_any_stride() -> None:
    encoding, grid = _encoding("shaw"), Grid.of(Layout.sequence(33), causal=True)
    packed = torch.randn(2, 33, 3, 4, 24)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    expected = attend(*(x.contiguous() for x in (q, k, v)), grid, encoding, backend="native")
    assert torch.equal(attend(q, k, v, grid, encoding, backend="native"), expected)
    expanded = k[:, :1].expand(-1, 4, -1, -1)
    torch.testing.assert_close(
        attend(q, expanded, v, grid, encoding, backend="native"),
        attend(q, expanded.contiguous(), v, grid, encoding, backend="reference"),
    )


@built
def test_dropout_keeps_the_mean_and_its_mask_is_that_of_the_backward_pass() -> None:
    grid = Grid.of(Layout.sequence(65), causal=True)
    q, k, v = (x.detach().double() for x in _inputs(65, 65, groups=4))
    encoding = _encoding("shaw").double()
    plain = attend(q, k, v, grid, encoding, backend="native")
    torch.manual_seed(1)
    many = [attend(q, k, v, grid, encoding, backend="native", dropout=0.3) for _ in range(200)]
    assert float((torch.stack(many).mean(0) - plain).detach().abs().mean()) < 0.05

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return attend(x, k, v, grid, encoding, backend="native", dropout=0.3).sin().sum()

    x, step = q.requires_grad_(), torch.randn_like(q)
    (gradient,) = torch.autograd.grad(seeded(x), x)
    with torch.no_grad():
        difference = (seeded(x + 1e-6 * step) - seeded(x - 1e-6 * step)) / 2e-6
    torch.testing.assert_close((gradient * step).sum(), difference, rtol=1e-5, atol=1e-6)


@built
def test_results_are_the_same_for_any_number_of_threads_and_in_many_at_once() -> None:
    grid = Grid.of(Layout.sequence(600))
    inputs = _inputs(600, 600, heads=2, groups=1, rows=1)
    encoding = posenc.create("shaw", head_dim=24, max_distance=30)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _both(inputs, grid, encoding, "native")
        torch.set_num_threads(3)
        found: list[list[Tensor]] = []

        def work() -> None:
            found.append(_both(inputs, grid, encoding, "native"))

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


@built
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


@built
def test_compiles() -> None:
    encoding, grid = _encoding("shaw"), Grid.of(Layout.sequence(33), causal=True)
    inputs = _inputs(33, 33)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="native")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    for one, other in zip(got, torch.autograd.grad(run(*inputs).sin().sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)


@built
def test_explain_names_it() -> None:
    inputs, grid = _inputs(33, 33), Grid.of(Layout.sequence(33))
    assert "compiled" in explain(*inputs, grid, _encoding("shaw"), backend="native").how


@built
@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_logits_of_a_single_key_have_no_gradient(name: str) -> None:
    """Its weight is 1; rounding that is summed over all tokens would not be small."""
    grid = Grid.of(Layout.sequence(300), causal=True, window=1)
    q, k, v = _inputs(300, 300)
    encoding = _encoding(name, causal=True)
    output = attend(q, k, v, grid, encoding, backend="native")
    table = next(iter(encoding.score.parameters())) if encoding.score is not None else q
    gradients = torch.autograd.grad(output.sin().sum(), (q, k, table), materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)


@built
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("window", [None, 7])
def test_buckets_reach_the_pairs_that_are_hidden(groups: int, window: int | None) -> None:
    """Strips of keys' terms read them, in the backward pass too."""
    grid = Grid.of(Layout.sequence(322), causal=True, window=window)
    encoding = _encoding("deberta")
    q, k, v = _inputs(322, 322, heads=4, groups=groups)
    problem = Call(q, k, v, grid, encoding).problem().rotated
    assert problem.lowered is not None
    offsets = Offsets.regular(grid)
    assert offsets.reach == (-321, 321)
    read = read_visible_terms(problem.lowered, problem, offsets)
    assert read.first == -321
    assert read.bucket is not None
    assert len(read.bucket) == 643
    _check("deberta", grid)


class TwoMaps(ScoreTerm):
    """``s_ij += q_i · (a[Δ] + b[Δ])``, with fewer rows in one table than in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(1, count, 24) for count in (3, 7))

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        terms = self.lower(q, k, grid, scale=scale)
        return sum(gather_rows(q, t.left.rows, t.bucket(grid.offset)) for t in terms)  # type: ignore[misc, union-attr]

    def lower(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> tuple[BucketedTerms, ...]:
        return tuple(
            BucketedTerms(
                lambda offset, last=rows.shape[1] - 1: offset[..., 0].long().clamp(0, last),  # type: ignore[misc]
                left=TokenTableProduct(q, rows),
            )
            for rows in self.tables
        )


@built
def test_maps_of_several_tables_that_agree_where_pairs_are_visible() -> None:
    torch.manual_seed(3)
    grid, encoding = Grid.of(Layout.sequence(30), window=1), Encoding(score=TwoMaps())
    got, expected = (_both(_inputs(30, 30), grid, encoding, b) for b in ("native", "reference"))
    _agree(got, expected)


@built
@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_modes_see_the_operator(name: str) -> None:
    """Calls that nothing observes skip PyTorch's dispatcher; those in a mode go through it."""
    seen: list[str] = []

    class Names(TorchDispatchMode):
        """Keeps the names of all operators."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    call = _inputs(300, 300), Grid.of(Layout.sequence(300)), _encoding(name), "native"
    plain = _both(*call)
    with Names():
        observed = _both(*call)
    assert {"posenc::native", "posenc::native_backward"} <= set(seen)
    for one, other in zip(plain, observed, strict=True):
        assert torch.equal(one, other)
