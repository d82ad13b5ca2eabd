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
from posenc import Encoding, Grid, Layout, ScoreTerm, ValueTerm, attend
from posenc.attention.backends.triton import launch
from posenc.attention.backends.triton.kernels.forward import forward_kernel
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel
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
from posenc.encoding import BucketedTerms, LowRank, StructuredScore, TokenTableProduct
from posenc.errors import BackendRefusal
from tests.attention.test_problem import leaves, whole
from tests.support.watching import Watched
from tests.testing.tolerances import distance, tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, KEY_HEADS, WIDTH = 2, 1, 16


class Everything(ScoreTerm):
    """Every kind of summand at once, by clipped offset.

    Args:
        clip: offsets beyond it are alike.
        max_distance: what is claimed of it; None claims nothing.
        rows: heads with rows of their own, or 1.
        by_query: there is a summand that is the same for all keys.
    """

    axes = None

    def __init__(
        self, clip: int, max_distance: int | None, rows: int, width: int, *, by_query: bool = True
    ) -> None:
        super().__init__()
        self.clip, self.max_distance, self.by_query = clip, max_distance, by_query
        buckets = 2 * clip + 1
        self.table = nn.Parameter(torch.randn(HEADS, buckets, dtype=torch.float64))
        self.left = nn.Parameter(torch.randn(rows, buckets, width, dtype=torch.float64))
        self.right = nn.Parameter(torch.randn(rows, buckets, width, dtype=torch.float64))
        self.column = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.factor = nn.Parameter(torch.randn(HEADS, 1, 3, dtype=torch.float64))

    def bucket(self, offset: Tensor) -> Tensor:
        return offset[..., 0].round().clamp(-self.clip, self.clip).long() + self.clip

    def _factors(self, grid: Grid) -> tuple[Tensor, Tensor]:
        powers = torch.arange(3)
        query, key = (
            (side.order.double().unsqueeze(-1) / 50) ** powers for side in (grid.query, grid.key)
        )
        return query.unsqueeze(1) * self.factor, key.unsqueeze(1).expand(-1, HEADS, -1, -1)

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        n = self.bucket(grid.offset)
        query, key = self._factors(grid)
        left = torch.einsum("bhid,hbijd->bhij", q, self.left[:, n].expand(HEADS, *[-1] * 4).to(q))
        right = torch.einsum("bhjd,hbijd->bhij", k, self.right[:, n].expand(HEADS, *[-1] * 4).to(q))
        column = (k * self.column.to(k)).sum(-1).unsqueeze(2)
        table = self.table[:, n].transpose(0, 1)
        row = q.sum(-1, keepdim=True) * (scale if self.by_query else 0)
        return (table + scale * (left + right) + row + column + query @ key.mT).to(q)

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[StructuredScore, ...] | None:
        n = self.bucket
        left, right = (
            TokenTableProduct(q * scale, self.left),
            TokenTableProduct(k * scale, self.right),
        )
        column = (k * self.column.to(k)).sum(-1)
        row = q.sum(-1) * scale if self.by_query else None
        return (
            BucketedTerms(
                n, table=self.table, left=left, column=column, max_distance=self.max_distance
            ),
            BucketedTerms(n, right=right, row=row, max_distance=self.max_distance),
            LowRank(*self._factors(grid)),
        )


class Values(ValueTerm):
    """A row for each clipped offset."""

    axes = None

    def __init__(self, like: Everything, rows: int, width: int) -> None:
        super().__init__()
        self.bucket, self.max_distance = like.bucket, like.max_distance
        buckets = 2 * like.clip + 1
        self.rows = nn.Parameter(torch.randn(rows, buckets, width, dtype=torch.float64))

    def forward(self, weights: Tensor, grid: Grid) -> Tensor:
        rows = self.rows[:, self.bucket(grid.offset)].expand(HEADS, *[-1] * 4)
        return torch.einsum("bhij,hbijd->bhid", weights, rows.to(weights))

    def lower(self, grid: Grid) -> BucketedTerms | None:
        return BucketedTerms(self.bucket, value=self.rows, max_distance=self.max_distance)


def everything(
    clip: int = 3,
    *,
    claimed: bool = True,
    rows: int = 1,
    width: int = WIDTH,
    out: int = WIDTH,
    by_query: bool = True,
) -> Encoding:
    torch.manual_seed(1)
    score = Everything(clip, clip if claimed else None, rows, width, by_query=by_query)
    return Encoding(score=score, value=Values(score, rows, out))


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


WHOLE = {
    "causal": (everything(), sequence(20, causal=True)),
    "two-sided": (everything(), sequence(20)),
    "nothing claimed": (everything(claimed=False), sequence(20)),
    "rows a head": (everything(rows=HEADS), sequence(20, causal=True)),
    "distance 0": (everything(0), sequence(20)),
    "far distance": (everything(15), sequence(20, causal=True)),
    "window": (everything(), sequence(33, window=6)),
    "chunk": (everything(), Grid(Layout.sequence(9, 31), Layout.sequence(40), causal=True)),
    "queries before keys": (
        everything(),
        Grid(Layout.sequence(20), Layout.sequence(17, 3), causal=True),
    ),
    "one of each": (everything(), sequence(1)),
    "padded": (everything(), Grid.of(Layout.padded([3], 20, side="left"), causal=True)),
    "packed": (everything(), Grid.of(Layout.packed([17, 3]), window=7)),
}


@pytest.mark.parametrize("case", WHOLE)
def test_the_whole_formula_and_all_gradients(case: str) -> None:
    encoding, grid = WHOLE[case]
    check(encoding, grid, inputs(grid, batch=grid.query.batch))


def test_groups_of_heads() -> None:
    grid = sequence(17, causal=True)
    encoding = posenc.create("rope", head_dim=WIDTH) + posenc.create(
        "t5", heads=4, max_distance=9, buckets=8, causal=True
    )
    check(encoding, grid, inputs(grid, batch=2, heads=(4, 2)))


def test_widths_that_are_no_powers_of_two() -> None:
    grid = sequence(18, causal=True)
    check(everything(width=24, out=5), grid, inputs(grid, width=24, out=5))


TABLES = {
    "rope": posenc.create("rope", head_dim=WIDTH),
    "alibi": posenc.create("alibi", heads=HEADS),
}

T5 = {
    causal: posenc.create("t5", heads=HEADS, max_distance=12, buckets=8, causal=causal)
    for causal in (False, True)
}

WITH_MARKS = {
    "padded": Grid.of(Layout.padded([9, 35]), causal=True),
    "packed": Grid.of(Layout.packed([33, 15]), causal=True),
    "all padding": Grid.of(Layout.padded([0, 17]), causal=True),
}


@pytest.mark.parametrize(
    ("name", "grid"),
    [("rope", "padded"), ("alibi", "packed"), ("t5", "padded"), ("t5", "all padding")],
)
def test_documents_and_padding(name: str, grid: str) -> None:
    where = WITH_MARKS[grid]
    encoding = T5[where.causal] if name == "t5" else TABLES[name]
    check(encoding, where, inputs(where, batch=max(where.query.batch, 1)))


def test_order_of_its_own() -> None:
    """Tokens one position apart, but seen in another order: causality goes token by token."""
    length = 33
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0)).unsqueeze(0)
    layout = Layout(torch.arange(float(length)).view(1, -1, 1), order)
    grid = Grid.of(layout, causal=True, window=9)
    check(T5[grid.causal], grid, inputs(grid))


def test_any_layout_where_nothing_depends_on_the_offset() -> None:
    grid = Grid.of(Layout.at(torch.linspace(0, 9, 33)), causal=True)
    check(TABLES["rope"], grid, inputs(grid))
    image = Grid.of(Layout.image(5, 6))
    check(Encoding(), image, inputs(image))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_errs_as_little_as_the_definition(dtype: torch.dtype) -> None:
    encoding, grid = WHOLE["rows a head"]
    given = inputs(grid, dtype=dtype)
    got = attend(*given, grid, encoding, backend="triton")
    gradients = torch.autograd.grad(got.double().sin().sum(), [*given, *encoding.parameters()])
    narrow = attend(*given, grid, encoding, backend="reference")
    naive = torch.autograd.grad(narrow.double().sin().sum(), [*given, *encoding.parameters()])
    wide = [x.detach().double().requires_grad_() for x in given]
    exact = attend(*wide, grid, encoding, backend="reference")
    wanted = torch.autograd.grad(exact.sin().sum(), [*wide, *encoding.parameters()])
    epsilon = torch.finfo(dtype).eps
    pairs = zip([got, *gradients], [narrow, *naive], [exact, *wanted], strict=True)
    for mine, theirs, true in pairs:
        # Rows of tables are rounded like q: an error in the logits, though their gradients cancel.
        size = max(4.0, true.abs().max().item())
        error = (mine.double() - true).abs().max()
        assert error <= 4 * (theirs.double() - true).abs().max() + 8 * epsilon * size


@pytest.mark.parametrize("tile", [(32, 16), (16, 32)])
def test_tiles_that_are_not_square(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (forward_kernel, gradients_kernel):
        chosen = type(kernel.configs[0])({"block_x": tile[0], "block_y": tile[1]})
        monkeypatch.setattr(kernel, "configs", [chosen])
    for grid in (sequence(40, window=20), WITH_MARKS["packed"]):
        check(T5[grid.causal], grid, inputs(grid))


def test_every_run_gives_the_same_bits() -> None:
    encoding, grid = WHOLE["rows a head"]
    given = inputs(grid)
    learned = [*given, *encoding.parameters()]
    runs = []
    for _ in range(2):
        output = attend(*given, grid, encoding, backend="triton")
        runs.append([output, *torch.autograd.grad(output.sin().sum(), learned)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_strided_inputs() -> None:
    grid = sequence(20, causal=True)
    given = inputs(grid)
    strided = [
        given[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        given[1].detach().mT.contiguous().mT.requires_grad_(),
        given[2].detach().expand(1, KEY_HEADS, -1, -1).requires_grad_(),
    ]
    check(T5[grid.causal], grid, strided)


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


def test_dropout_is_the_same_in_both_directions() -> None:
    """With unit vectors for values the output shows the weights that were kept."""
    grid = sequence(32, causal=True)
    q, k, _ = (x.detach() for x in inputs(grid))
    v = torch.eye(32).expand(1, KEY_HEADS, -1, -1).contiguous()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    torch.manual_seed(3)
    kept = attend(q, k, v, grid, T5[grid.causal], backend="triton", dropout=0.4)
    weights = attend(q, k, v, grid, T5[grid.causal], backend="reference")
    chosen = (kept != 0).float()
    share = chosen.sum() / grid.visible.expand_as(chosen).sum()
    assert 0.5 < share < 0.7
    torch.testing.assert_close(kept, weights * chosen / 0.6, atol=1e-5, rtol=1e-5)
    learned = [q, k, v, *T5[grid.causal].parameters()]
    got = torch.autograd.grad(kept.sin().sum(), learned)
    keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    logits = q @ keys.mT * WIDTH**-0.5
    logits = logits + T5[grid.causal].score(q, keys, grid, scale=1.0)  # type: ignore[misc]
    softmax = logits.masked_fill(~grid.visible, -torch.inf).softmax(-1)
    wanted = torch.autograd.grad((softmax * chosen / 0.6 @ values).sin().sum(), learned)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


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
    encoding = TABLES["rope"] + T5[grid.causal]

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
    _, grid = WHOLE["chunk"]
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
        given = tuple(flatten(replace(record, q=q), SCHEMA))
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
    """Of the definition by the structured form, of which everything is a part."""
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


def test_they_read_the_whole_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what is said otherwise, by offsets and segments, and bands of the CPU kernels."""
    monkeypatch.setattr(launch.Launch, "_kind", ())
    function = PairTerm("distance", tuple(torch.rand(n) for n in ((1, 9), (2,), (4, 3), (4, 3))))
    record = whole()
    function = replace(function, tensors=(*function.tensors, torch.rand(1, 5)))
    terms = replace(record.terms, bucket=None)
    rows = {name: torch.randn(1, 9, 6) for name in ("left_rows", "right_rows")}
    terms = replace(terms, **rows, value_rows=torch.randn(1, 9, 4))
    geometry = Geometry(0, -4, 4)
    record = replace(record, pairs=function, terms=terms, geometry=geometry)
    watched = Watched(record)
    for for_keys in (False, True):
        launch.Launch(watched).common(for_keys=for_keys)  # type: ignore[arg-type]
    others = {"terms.bucket", "splits"}
    others |= {f"geometry.{name}" for name in ("period", "jump", "intervals", "bands")}
    assert watched.read == {field.path for field in leaves(SCHEMA)} - others


@pytest.mark.parametrize(("width", "window"), [(1, 7), (5, None)])
def test_relative_logits(width: int, window: int | None) -> None:
    """Rows of another width than heads, a zero one among them, and queries that grow."""
    encoding = posenc.create(
        "relative_logits", dim=12, heads=HEADS, width=width, extent=20, floor=9.0
    )
    nn.init.normal_(encoding.score.profiles)
    grid = sequence(33, causal=True, window=window)
    signal = torch.randn(1, 33, HEADS * width, requires_grad=True)
    observed = replace(grid, query=replace(grid.query, signal=signal))
    given = inputs(observed)
    check(encoding, observed, given)
    outputs = (attend(*given, observed, encoding, backend=name) for name in ("triton", "reference"))
    mine, theirs = (torch.autograd.grad(x.double().sin().sum(), signal)[0] for x in outputs)
    torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=3e-5)
