"""The kernels of the Triton backend on CPU tensors, by Triton's interpreter.

Not collected by itself: ``test_triton.py`` runs it in a process with ``TRITON_INTERPRET=1``, which
has to be set before anything imports Triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.triton import launch
from posenc.attention.problem.record import (
    FIELDS,
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
    flatten,
)
from posenc.attention.problem.terms import Terms
from posenc.errors import BackendRefusal
from tests.attention.test_problem import whole
from tests.support.watching import Watched
from tests.testing.tolerances import distance, tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, KEY_HEADS, WIDTH = 2, 1, 16


def everything() -> Encoding:
    """Products with queries and with keys by clipped offset, and rows of values."""
    torch.manual_seed(1)
    sizes = {"dim": HEADS * WIDTH, "heads": HEADS, "head_dim": WIDTH}
    score = posenc.create("deberta", **sizes, max_distance=4, buckets=4).score
    value = posenc.create("shaw", head_dim=WIDTH, max_distance=3).value
    encoding = Encoding(score=score, value=value).double()
    for parameter in encoding.parameters():
        nn.init.normal_(parameter)
    return encoding


def inputs(
    grid: Grid,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (HEADS, KEY_HEADS),
    width: int = WIDTH,
    out: int = WIDTH,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, features: int) -> Tensor:
        x = torch.randn(batch, heads, length, features, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    keys = grid.key.length
    return [
        draw(heads[0], grid.query.length, width),
        draw(heads[1], keys, width),
        draw(heads[1], keys, out),
    ]


def both(
    encoding: Encoding, grid: Grid, given: list[Tensor], **options: Any
) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Output and gradients of inputs and parameters by Triton, then by the definition.

    The LSE of both are compared, and in the gradients, if weights are a softmax.
    """
    softmax = encoding.score is None or not encoding.score.replaces_softmax
    learned = [p for p in encoding.parameters() if p.requires_grad]
    learned += [x for x in options.values() if isinstance(x, Tensor)]
    found: list[Tensor | list[Tensor]] = []
    sums = []
    for backend, chosen in (("triton", given), ("reference", [x.double() for x in given])):
        output = attend(*chosen, grid, encoding, backend=backend, return_lse=softmax, **options)
        loss = torch.zeros((), dtype=torch.float64)
        if isinstance(output, tuple):
            output, lse = output
            sums.append(lse.double())
            loss = lse.double().masked_fill(lse.isneginf(), 0.0).sin().sum()
        loss = loss + output.double().sin().sum()
        gradients = torch.autograd.grad(loss, [*given, *learned], materialize_grads=True)
        found += [output, list(gradients)]
    tolerance = 3e-5 if given[0].dtype == torch.float32 else 5e-2
    if sums:
        torch.testing.assert_close(*sums, atol=tolerance, rtol=tolerance)
    return tuple(found)  # type: ignore[return-value]


def check(
    encoding: Encoding, grid: Grid, given: list[Tensor], *, tolerance: float = 3e-5, **options: Any
) -> None:
    got, gradients, expected, wanted = both(encoding, grid, given, **options)
    assert got.dtype == given[0].dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(gradients, wanted, strict=True):
        size = 1 + theirs.abs().max().item()
        torch.testing.assert_close(
            mine.double(), theirs.double(), atol=tolerance * size, rtol=tolerance
        )


@pytest.fixture(autouse=True)
def _small_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences have squares of pairs that read one entry of the tables alone."""
    monkeypatch.setattr(launch, "SPANS", (32, 32))


def test_memory_is_poisoned() -> None:
    assert torch.empty(100).isnan().all()


def sequence(length: int, *, causal: bool = False, window: int | None = None) -> Grid:
    return Grid.of(Layout.sequence(length), causal=causal, window=window)


T5 = {
    causal: posenc.create("t5", heads=HEADS, max_distance=12, buckets=8, causal=causal)
    for causal in (False, True)
}


def test_hidden_tiles_are_not_read() -> None:
    """Tiles that nobody sees may hold NaN."""
    grid = Grid(Layout.sequence(16), Layout.sequence(64), causal=True)
    q, k, v = (x.detach() for x in inputs(grid))
    clean = attend(q, k, v, grid, T5[grid.causal], backend="triton")
    k[:, :, 16:], v[:, :, 16:] = torch.nan, torch.nan
    assert torch.equal(attend(q, k, v, grid, T5[grid.causal], backend="triton"), clean)
    packed = Grid.of(Layout.packed([32, 32]))
    q, k, v = (x.detach() for x in inputs(packed))
    clean = attend(q, k, v, packed, T5[False], backend="triton")
    v[:, :, 32:] = torch.nan
    poisoned = attend(q, k, v, packed, T5[False], backend="triton")
    assert torch.equal(poisoned[:, :, :32], clean[:, :, :32])
    assert poisoned[:, :, 32:].isnan().all()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.sequence(9), marks=pytest.mark.exhaustive),
        Layout.padded([9, 4], side="left"),
    ],
)
def test_compiled_equals_eager(layout: Layout) -> None:
    grid = Grid.of(layout, causal=True)
    given = inputs(grid, batch=layout.batch)
    encoding = posenc.create("rope", head_dim=WIDTH) + T5[grid.causal]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="triton")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    learned = [*given, *encoding.parameters()]
    eager, *others = (
        [output, *torch.autograd.grad(output.sin().sum(), learned)]
        for output in (run(*given), compiled(*given), checkpoint(run, *given, use_reentrant=False))
    )
    for other in others:
        torch.testing.assert_close(other, eager)


def test_the_operator_is_registered_as_it_behaves() -> None:
    grid = Grid(Layout.sequence(9, 31), Layout.sequence(40), causal=True)
    q, k, v = inputs(grid)
    rows = [torch.randn(1, 4, WIDTH, requires_grad=True) for _ in range(3)]
    terms = Terms(
        bias_by_offset=torch.randn(HEADS, 4, requires_grad=True),
        column=torch.randn(1, HEADS, 40),
        left=torch.randn_like(q),
        left_rows=rows[0],
        right=torch.randn(1, HEADS, 40, WIDTH),
        right_rows=rows[1],
        value_rows=rows[2],
    )
    numbers, slope, rates = (
        torch.rand(size, requires_grad=True) for size in ((1, 4), (HEADS, 3), (1, 9))
    )
    function = PairTerm("distance", (numbers, torch.rand(2), slope, torch.rand(HEADS, 3), rates))
    factors = [torch.randn(1, 1, length, WIDTH // 2) for length in (9, 9, 40, 40)]
    record = KernelProblem(
        *(q, k, v, 0.25, terms, function),
        *(Geometry(8, -40, 3), SegmentMask(), RotaryFactors(*factors, adjacent=True)),
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for heads_first in (True, False):
        if not heads_first:  # as projections leave them
            q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        given = tuple(flatten(replace(record, q=q)))
        torch.library.opcheck(torch.ops.posenc.triton.default, given, test_utils=checks)
        assert torch.ops.posenc.triton(*given)[0].stride() == q.stride()


REFUSALS = [
    (T5[False], sequence(9), {"dtype": torch.float64}, "float32 at most"),
    (T5[False], sequence(9), {"width": 272}, "width 256 at most"),
    (T5[False], Grid.of(Layout.at(torch.linspace(0, 1, 9))), {}, "one position apart"),
    (posenc.create("dape", heads=HEADS), sequence(9, causal=True), {}, "no struct"),
    (posenc.create("swin", heads=HEADS, window=(3, 3)), Grid.of(Layout.image(3, 3)), {}, "axes"),
]


@pytest.mark.parametrize(("encoding", "grid", "options", "reason"), REFUSALS)
def test_refuses_with_the_reason(
    encoding: Encoding, grid: Grid, options: dict[str, int], reason: str
) -> None:
    with pytest.raises(BackendRefusal, match=reason):
        attend(*inputs(grid, **options), grid, encoding, backend="triton")  # type: ignore[arg-type]


def test_padding_holds_anything() -> None:
    """NaN in q, k and v of invalid tokens reaches no value and no gradient."""
    grid, results = Grid.of(Layout.padded([3], 20, side="left"), causal=True), []
    encoding = everything()
    for fill in (0.0, torch.nan):
        given = [x.detach().clone() for x in inputs(grid)]
        for x in given:
            x[:, :, :17] = fill
            x.requires_grad_()
        output = attend(*given, grid, encoding, backend="triton")
        learned = [*given, *encoding.parameters()]
        results.append([output, *torch.autograd.grad(output.sin().sum(), learned)])
    for plain, poisoned in zip(*results, strict=True):
        assert torch.equal(plain, poisoned)


def test_second_derivatives() -> None:
    """Of the definition by the structured form."""
    encoding, grid = everything(), sequence(20, causal=True)
    given, learned = inputs(grid), list(encoding.parameters())
    doubles = inputs(grid, dtype=torch.float64)
    found = []
    for backend, chosen in (("triton", given), ("reference", given), ("reference", doubles)):
        output = attend(*chosen, grid, encoding, backend=backend)
        first = torch.autograd.grad(output.sin().sum(), chosen, create_graph=True)
        squares = sum((x.double().square().sum() for x in first), torch.zeros(()))
        found.append(torch.autograd.grad(squares, [*chosen, *learned]))
    for mine, reference, exact in zip(*found, strict=True):
        assert distance(mine, exact) <= tolerance(reference, exact)


@pytest.mark.parametrize("cap", [0.05, 50.0, 1e5])
def test_caps_of_any_size(cap: float) -> None:
    """Logits far above the cap, and far below it, where one less e^-2x would cancel."""
    grid = sequence(20, causal=True)
    check(Encoding(), grid, [(3 * x).detach().requires_grad_() for x in inputs(grid)], softcap=cap)


def test_they_read_the_whole_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what is said otherwise, by offsets and segments, and bands of the CPU kernels."""
    monkeypatch.setattr(launch.Launch, "kind", ())
    function = PairTerm("distance", tuple(torch.rand(n) for n in ((1, 9), (2,), (4, 3), (4, 3))))
    record = whole()
    function = replace(function, tensors=(*function.tensors, torch.rand(1, 5)))
    terms = replace(record.terms, bucket=None)
    rows = {name: torch.randn(1, 9, 6) for name in ("left_rows", "right_rows")}
    terms = replace(terms, **rows, value_rows=torch.randn(1, 9, 4))
    geometry = Geometry(0, -4, 4)
    record = replace(record, pairs=function, terms=terms, geometry=geometry)
    watched, unlaunched = Watched(record), {1: lambda *given, **named: None}
    for for_keys in (False, True):
        launched = launch.Launch(watched)  # type: ignore[arg-type]
        launched.run(unlaunched, 1, launched.arguments(for_keys=for_keys))
    others = {"terms.bucket", "splits"}
    others |= {f"geometry.{name}" for name in ("period", "jump", "intervals", "bands")}
    assert watched.read == {field.path for field in FIELDS} - others


@pytest.mark.parametrize(
    ("name", "reason"), [("cope", "do not cap"), ("forgetting", "a cap takes sums of gates")]
)
def test_sums_have_no_cap(name: str, reason: str) -> None:
    encoding = posenc.create(name, dim=12, heads=HEADS, head_dim=WIDTH)
    layout = encoding.observe(torch.randn(1, 20, 12), Layout.sequence(20))
    grid = Grid.of(layout, causal=True)
    with pytest.raises(BackendRefusal, match=reason):
        attend(*inputs(grid), grid, encoding, backend="triton", softcap=2.0)
