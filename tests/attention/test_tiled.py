"""The tiled backend against the definition: values, all gradients, memory, dropout, compiling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.native.build import missing
from posenc.attention.backends.tiled import band as band_module
from posenc.attention.backends.tiled import blockwise, engine, images, near, passes, tiles
from posenc.attention.backends.tiled.band import Band
from posenc.testing.subject import agree

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


@pytest.fixture(params=["small tiles", "usual tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short text has all kinds of them, then the real ones."""
    if request.param == "small tiles":
        for name, value in (("BLOCK", 32), ("TILE", (16, 24)), ("LANES", 4)):
            monkeypatch.setattr(passes if name != "LANES" else engine, name, value)
        monkeypatch.setattr(tiles, "PIECE", 7)
        monkeypatch.setattr(band_module, "LEAST", 4)
        monkeypatch.setattr(blockwise, "BUDGET", 2000)
        monkeypatch.setattr(near, "SHARE", 0.5)


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
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, grid.query.length), (3, grid.key.length), (3, grid.key.length))
    return [
        torch.randn(2, heads, length, 8, generator=generator, dtype=dtype).requires_grad_()
        for heads, length in shapes
    ]


def run(
    encoding: Encoding, grid: Grid, tensors: list[Tensor], backend: str, **options: float
) -> list[Tensor]:
    """The output, and the gradients of everything (zero where there is none)."""
    output = attend(*tensors, grid, encoding, backend=backend, **options)  # type: ignore[arg-type]
    wanted = [*tensors, *(p for p in encoding.parameters() if p.requires_grad)]
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    found = torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
    return [
        output,
        *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)),
    ]


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("where", GRIDS)
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_definition(name: str, where: str) -> None:
    grid = GRIDS[where]
    encoding, tensors = make(name, causal=grid.causal), inputs(grid)
    got, expected = (run(encoding, grid, tensors, way) for way in ("tiled", "reference"))
    for mine, theirs in zip(got, expected, strict=True):
        # Biases are made from positions in float32, and so are gradients of what makes them.
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("name", ["cope", "fire", "t5+sinusoidal", "stick_breaking"])
def test_without_structured_form_by_blocks(name: str) -> None:
    grid = GRIDS["causal"]
    encoding, tensors = make(name, causal=True), inputs(grid)
    if name != "t5+sinusoidal":
        told = explain(*tensors, grid, encoding, backend="tiled")
        assert "some queries at a time" in told.how
    got, expected = (run(encoding, grid, tensors, way) for way in ("tiled", "reference"))
    for mine, theirs in zip(got, expected, strict=True):
        # Offsets are float32, and with them what their function's parameters get.
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sides", [(7, 9), (1, 13), (13, 1), (20, 17)])
@pytest.mark.parametrize("name", ["swin", "swin_v2", "irpe"])
@pytest.mark.parametrize("frozen", [False, True])
def test_tables_between_images(
    name: str, sides: tuple[int, int], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "TILE", (20, 30))
    monkeypatch.setattr(images, "LANES", 4)
    options = {"irpe": {"mode": "bias"}}.get(name, {"window": (20, 20)})
    encoding = posenc.create(name, dim=48, heads=6, head_dim=8, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
    encoding.requires_grad_(not frozen)
    grid = Grid.of(Layout.image(*sides))
    tensors = inputs(grid)
    assert "image rows" in explain(*tensors, grid, encoding, backend="tiled").how
    got, expected = (run(encoding, grid, tensors, way) for way in ("tiled", "reference"))
    for mine, theirs in zip(got, expected, strict=True):
        agree(name, mine, theirs)  # the network of swin_v2 reads offsets in float32


def test_frozen_tables_too() -> None:
    for where in ("square", "causal", "window"):
        encoding = make("t5", causal=GRIDS[where].causal).requires_grad_(False)
        tensors = inputs(GRIDS[where])
        got, expected = (run(encoding, GRIDS[where], tensors, w) for w in ("tiled", "reference"))
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_gradients_with_dropout_are_of_what_was_computed(name: str) -> None:
    """The same weights are dropped forward and backward: seen by finite differences."""
    grid = GRIDS["causal"]
    encoding, tensors = make(name, causal=True), inputs(grid)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        output = attend(q, k, v, grid, encoding, backend="tiled", dropout=0.4)
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


def test_dropout_is_the_same_with_any_number_of_threads() -> None:
    encoding, (q, k, v) = make("shaw", causal=False), inputs(GRIDS["square"])
    threads, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            outputs.append(attend(q, k, v, GRIDS["square"], encoding, backend="tiled", dropout=0.3))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)


def test_dropout_drops_its_share() -> None:
    grid = Grid.of(Layout.sequence(300))
    q, k = torch.zeros(1, 2, 300, 8), torch.zeros(1, 2, 300, 8)
    v = torch.ones(1, 2, 300, 8)
    output = attend(q, k, v, grid, Encoding(), backend="tiled", dropout=0.3)
    assert output.mean().item() == pytest.approx(1.0, abs=0.01)
    assert output.std().item() == pytest.approx(math.sqrt(0.3 / 0.7 / 300), rel=0.2)


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers any new tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else (made,):
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return made


@pytest.mark.parametrize("name", ["t5", "shaw", "deberta", "cope"])
def test_memory_does_not_grow_with_the_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 6000
    if name == "cope":  # every pair is computed: a shorter text, in blocks as much smaller
        length = 1500
        monkeypatch.setattr(blockwise, "BUDGET", blockwise.BUDGET // 16)
    grid = Grid.of(Layout.sequence(length), causal=True)
    encoding = make(name, causal=True).float()
    tensors = [x[:1].detach().requires_grad_() for x in inputs(grid, dtype=torch.float32)]
    with LargestTensor() as memory:
        attend(*tensors, grid, encoding, backend="tiled").sum().backward()
    assert memory.most <= 2 * blockwise.BUDGET
    assert memory.most < 6 * length * length / 10


def test_the_same_twice() -> None:
    for name in ("t5", "shaw", "transformer_xl"):
        encoding, tensors = make(name, causal=True), inputs(GRIDS["causal"])
        first, second = (run(encoding, GRIDS["causal"], tensors, "tiled") for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "deberta", "transformer_xl"])
def test_side_by_side_equals_alone(name: str) -> None:
    """Workers (ALiBi's heads have bands of their own) share nothing that they write."""
    grid = Grid.of(Layout.sequence(300))
    encoding, tensors = make(name, causal=False), inputs(grid)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(encoding, grid, tensors, "tiled")
        torch.set_num_threads(3)
        first, second = (run(encoding, grid, tensors, "tiled") for _ in range(2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    for one, other, again in zip(alone, first, second, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
        assert torch.equal(other, again)


def test_pairs_that_cannot_matter_are_left_out() -> None:
    """ALiBi's steep heads look back a little only, and nothing changes beyond rounding."""
    length = 3000
    grid = Grid.of(Layout.sequence(length), causal=True)
    encoding = posenc.create("alibi", heads=6)
    tensors = [x.detach()[:1] for x in inputs(grid, dtype=torch.float32)]
    tiled = attend(*tensors, grid, encoding, backend="tiled")
    for begin in (0, 1350, 2700):
        rows = slice(begin, begin + 300)
        part = Grid(grid.query.slice(begin, begin + 300), grid.key, causal=True)
        few = [tensors[0][:, :, rows], *tensors[1:]]
        exact = attend(*(x.double() for x in few), part, encoding, backend="reference")
        plain = attend(*few, part, encoding, backend="reference")
        errors = [(way - exact).abs().max().item() for way in (tiled[:, :, rows], plain)]
        assert errors[0] <= 2 * errors[1]
    line = encoding.score.bias(grid.distinct_offsets().float())  # type: ignore[union-attr, operator]
    q, k, v = tensors
    x = engine.Operands(q * 8**-0.5, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), line)
    groups = engine._narrowed(x, Band.of(grid, None), constant=True)
    spans = [(end - begin, band.last - band.first) for (begin, end), band in groups]
    assert sum(heads for heads, _ in spans) == 6
    assert min(span for _, span in spans) < 400
    assert max(span for _, span in spans) > 2500
    huge = engine.Operands(1000 * x.q, x.k, x.v, line)
    assert len(engine._narrowed(huge, Band.of(grid, None), constant=True)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_narrow_dtypes_err_no_more_than_reference(name: str, dtype: torch.dtype) -> None:
    grid = GRIDS["causal"]
    encoding = make(name, causal=True).float()
    tensors = [x.detach().to(dtype) for x in inputs(grid)]
    exact = attend(*(x.double() for x in tensors), grid, encoding, backend="reference")
    error = {
        way: (attend(*tensors, grid, encoding, backend=way).double() - exact).abs().max()
        for way in ("tiled", "reference")
    }
    assert error["tiled"] <= 4 * error["reference"] + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["t5", "shaw", "transformer_xl"])
def test_compiled_equals_eager(name: str) -> None:
    encoding = make(name, causal=True).float()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grid = Grid.of(Layout.sequence(q.shape[2]), causal=True)
        return attend(q, k, v, grid, encoding, backend="tiled")

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


@pytest.mark.parametrize(("causal", "heads_last"), [(1, False), (0, True)])
def test_the_operators_are_well_registered(causal: int, heads_last: bool) -> None:
    """Shapes and strides are what compilers are told, in the fused kernel's single call too."""
    q, k, v = torch.randn(3, 2, 6, 97, 8)
    if heads_last:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    line = torch.randn(6, 193, requires_grad=bool(causal))
    torch.library.opcheck(
        torch.ops.posenc.tiled.default,
        (
            *(x.requires_grad_() for x in (q, k, v)),
            line,
            *[None] * 6,
            0.4,
            [0, causal, -1, -1],
            0.0,
            0,
            bool(causal),
            False,
        ),
    )
    given = [q.detach(), k.detach(), v.detach(), line.detach(), *[None] * 6]
    rest = (0.4, [0, causal, -1, -1], 0.0, 0, bool(causal))
    saved = torch.ops.posenc.tiled(*given, *rest, False)
    torch.library.opcheck(
        torch.ops.posenc.tiled_backward.default,
        (torch.randn_like(q.detach()), list(saved), given, *rest),
    )


def test_under_checkpointing() -> None:
    encoding, tensors = make("shaw", causal=True), inputs(GRIDS["causal"])

    def step(*given: Tensor) -> Tensor:
        return attend(*given, GRIDS["causal"], encoding, backend="tiled")

    saved = checkpoint(step, *tensors, use_reentrant=False)
    got = torch.autograd.grad(saved.sin().sum(), tensors)
    expected = torch.autograd.grad(step(*tensors).sin().sum(), tensors)
    torch.testing.assert_close(got, expected)


def test_auto_takes_it_where_the_definition_would_take_too_much() -> None:
    encoding = posenc.create("shaw", head_dim=8)
    many = "tiled" if missing() else "native"
    for length, backend in ((60, "reference"), (2048, many)):
        grid = Grid.of(Layout.sequence(length), causal=True)
        told = explain(*inputs(grid, dtype=torch.float32), grid, encoding)
        assert told.backend == backend
    packed = Grid.of(Layout.packed([1000, 1048]), causal=True)
    told = explain(*inputs(packed, dtype=torch.float32), packed, posenc.create("rope", head_dim=8))
    assert told.backend == many
    if missing():
        assert "each document by itself" in told.how


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("max_distance", [None, 0, 3, 40])
@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("shift", [-7, 0, 4])
def test_key_ranges_hold_every_visible_pair_once(
    causal: bool,
    max_distance: int | None,
    window: int | None,
    shift: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(band_module, "LEAST", 2)
    queries, keys = 23, 31
    band = Band.regular(
        queries, keys, shift=shift, causal=causal, window=window, max_distance=max_distance
    )
    for begin, end in band.blocks(8):
        key_ranges = band.key_ranges(begin, end)
        at = [part.begin for part in key_ranges]
        assert at == sorted(at)
        for row in range(begin, end):
            query = queries - 1 - row
            for key in range(keys):
                offset = shift + key - query
                seen = (not causal or offset <= 0) and (window is None or abs(offset) < window)
                holders = [s for s in key_ranges if s.begin <= key < s.end]
                assert len(holders) <= 1
                assert holders or not seen
                if holders and holders[0].kind != "near":
                    assert seen
                    assert max_distance is not None
                    side = 1 if holders[0].kind == "ahead" else -1
                    assert side * offset >= max_distance
