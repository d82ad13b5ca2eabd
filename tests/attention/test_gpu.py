"""Every backend on a CUDA device, against ``reference`` in float64, in memory full of NaN.

With ``POSENC_TEST_DEVICE=cpu`` and ``TRITON_INTERPRET=1`` what needs no device runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, Prepared, attend, explain
from posenc.attention import BACKENDS, Backend
from posenc.attention.backends.triton import Triton
from posenc.encodings.query_key.rope import Rope
from posenc.errors import BackendRefusal
from tests.support.interpreter import language_patched
from tests.support.tiling import first_tiles_that_fit

DEVICE = os.environ.get("POSENC_TEST_DEVICE", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # of PyTorch's compiler
]

HEADS, KEY_HEADS, WIDTH = 4, 2, 64

LENGTH = 130 if DEVICE == "cuda" else 20

UNFUSED = Triton(fuse_rotations=False)

LONG = 131_072

LAYOUTS = {
    "sequence": Layout.sequence(LENGTH),
    "padded": Layout.padded([LENGTH, LENGTH // 3, 0], side="left"),
    "packed": Layout.packed([LENGTH // 2 - 5, LENGTH - (LENGTH // 2 - 5)]),
}

STRUCTURED = ["nope", "rope", "alibi", "t5", "shaw", "transformer_xl", "deberta", "tupe"]

ON_IMAGES = ["swin", "irpe", "rope2d"]

TOLERANCE = {torch.float32: 3e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    """Triton's interpreter, where there is no device, without what makes it slow."""
    if DEVICE == "cuda":
        yield
        return
    with language_patched():
        yield


@pytest.fixture(autouse=True)
def _first_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles are not chosen by measurement, which takes most of the time, unless a test asks."""
    if "measured_tiles" in request.fixturenames:
        yield
        return
    with first_tiles_that_fit():
        yield


@pytest.fixture
def measured_tiles() -> None:
    """Tiles are chosen as they are for users."""


def created(
    name: str, *, width: int = WIDTH, length: int = LENGTH, causal: bool = True
) -> Encoding:
    """An encoding none of whose parameters is all zero, which would hide mistakes."""
    torch.manual_seed(1)
    encoding = posenc.create(
        name, dim=HEADS * width, heads=HEADS, head_dim=width, max_length=length, causal=causal
    )
    for parameter in encoding.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return encoding.to(DEVICE)


def inputs(
    grid: Grid,
    *,
    dtype: torch.dtype = torch.float32,
    width: int = WIDTH,
    heads: tuple[int, int] = (HEADS, KEY_HEADS),
) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((heads[0], grid.query.length), *[(heads[1], grid.key.length)] * 2)
    return [
        torch.randn(grid.key.batch, *size, width, device=DEVICE, dtype=dtype).requires_grad_()
        for size in sizes
    ]


def poison() -> None:
    """Leave NaN in the memory that the next tensors are given, small and large."""
    held = [torch.full((2**16,), torch.nan, device=DEVICE) for _ in range(256)]
    held.append(torch.full((2**26,), torch.nan, device=DEVICE))
    del held


def serving(
    given: list[Tensor], grid: Grid, encoding: Encoding, **options: Any
) -> list[str | Backend]:
    """The backends that do not refuse."""
    found: list[str | Backend] = []
    for name in [*BACKENDS, *([UNFUSED] if encoding.query_key is not None else ())]:
        try:
            explain(*given, grid, encoding, backend=name, **options)
        except BackendRefusal:
            continue
        found.append(name)
    return found


def run(
    backend: str | Backend, given: list[Tensor], grid: Grid, encoding: Encoding, **options: Any
) -> list[Tensor]:
    """The output, then the gradients of all inputs and parameters that it depends on."""
    learned = [*given, *(p for p in encoding.parameters() if p.requires_grad)]
    learned += [x for x in options.values() if isinstance(x, Tensor)]
    poison()
    output = attend(*given, grid, encoding, backend=backend, **options)
    found = torch.autograd.grad(output.double().sin().sum(), learned, materialize_grads=True)
    return [output, *found]


def agree(
    got: list[Tensor], wanted: list[Tensor], tolerance: float, backend: str | Backend
) -> None:
    for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        # Some gradients cancel, but what is summed does not: it is of this order.
        size = (1 if tolerance < 1e-3 else 4) + theirs.abs().max()
        error = (mine.double() - theirs.double()).abs().max().item()
        name = backend if isinstance(backend, str) else backend.name
        assert error <= tolerance * size.item(), f"{name}, tensor {number}: {error} of {size}"


def check(
    encoding: Encoding,
    grid: Grid,
    given: list[Tensor],
    expected: tuple[str, ...] = ("triton",),
    **options: Any,
) -> None:
    """All backends that serve it, among them those expected, against the definition.

    FlexAttention, which takes half a minute to compile a problem, only where it is expected.
    """
    backends = serving(given, grid, encoding, **options)
    assert set(expected) <= set(backends)
    backends = [backend for backend in backends if backend != "flex" or backend in expected]
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = run("reference", wide, grid, encoding, **options)
    for backend in backends:
        got = run(backend, given, grid, encoding, **options)
        agree(got, wanted, TOLERANCE[given[0].dtype], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rope", "t5", "deberta"])
def test_sinks_and_caps(name: str, dtype: torch.dtype) -> None:
    grid = Grid.of(LAYOUTS["packed"].to(DEVICE), causal=True)
    given = inputs(grid, dtype=dtype)
    sinks = torch.linspace(-1, 2, HEADS, device=DEVICE).requires_grad_()
    check(created(name), grid, given, sinks=sinks)
    check(created(name), grid, given, sinks=sinks, softcap=1.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*STRUCTURED, "fire"])
def test_equals_reference(name: str, causal: bool, layout: str) -> None:
    grid = Grid.of(LAYOUTS[layout].to(DEVICE), causal=causal)
    check(created(name, causal=causal), grid, inputs(grid))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", STRUCTURED)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    grid = Grid.of(LAYOUTS["sequence"].to(DEVICE), causal=True)
    check(created(name), grid, inputs(grid, dtype=dtype))


@pytest.mark.parametrize("width", [16, 32, 40, 128, 256])
@pytest.mark.parametrize("name", ["rope", "t5", "shaw", "deberta"])
def test_head_sizes(name: str, width: int) -> None:
    grid = Grid.of(LAYOUTS["sequence"].to(DEVICE), causal=True)
    dtype = torch.bfloat16
    check(created(name, width=width), grid, inputs(grid, width=width, dtype=dtype))


@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_windows_chunks_and_grouped_heads(name: str) -> None:
    whole = Layout.sequence(LENGTH, device=DEVICE)
    for grid in (
        Grid.of(whole, causal=True, window=20),
        Grid.of(whole, window=33),
        Grid(whole.slice(2 * LENGTH // 3, LENGTH), whole, causal=True),
    ):
        check(created(name, causal=grid.causal), grid, inputs(grid))


@pytest.mark.parametrize("name", ON_IMAGES)
def test_images(name: str) -> None:
    """A form other than a line of offsets; ``blockwise`` or the definition serves it at least."""
    grid = Grid.of(Layout.image(8, 9).to(DEVICE))
    torch.manual_seed(1)
    options = {"window": (8, 9)} if name == "swin" else {}
    encoding = posenc.create(name, heads=HEADS, head_dim=WIDTH, **options).to(DEVICE)
    check(encoding, grid, inputs(grid), expected=("reference",))


ROTATIONS = {
    "halves": Rope(head_dim=WIDTH, gain=1.2),
    "neighbours": Rope(head_dim=WIDTH, pairing="adjacent"),
    "some halves": Rope(head_dim=WIDTH, fraction=0.5),
    "some neighbours": Rope(head_dim=WIDTH, pairing="adjacent", fraction=0.25),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations_in_the_kernels(case: str, layout: str, dtype: torch.dtype) -> None:
    encoding, whole = Encoding(query_key=ROTATIONS[case]), LAYOUTS[layout].to(DEVICE)
    for grid in (
        Grid.of(whole, causal=True),
        Grid(whole.slice(LENGTH // 2, LENGTH), whole, causal=True),
    ):
        given = inputs(grid, dtype=dtype)
        assert "as they read them" in str(explain(*given, grid, encoding, backend="triton"))
        check(encoding, grid, given, ("triton", UNFUSED))


@pytest.mark.parametrize("name", ["rope+t5", "rope+alibi", "rope_pp", "p_rope"])
def test_rotations_beside_tables_and_a_query_head_each(name: str) -> None:
    grid = Grid.of(LAYOUTS["sequence"].to(DEVICE), causal=True)
    given = inputs(grid)
    assert "as they read them" in str(explain(*given, grid, created(name), backend="triton"))
    check(created(name), grid, given, ("triton", UNFUSED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations_of_a_cache(case: str, dtype: torch.dtype) -> None:
    length, encoding = 5000, Encoding(query_key=ROTATIONS[case])
    past = Layout.padded([length, 77], side="left").to(DEVICE)
    grid = Grid(past.slice(length - 1, length), past, causal=True)
    given = [x.detach() for x in inputs(grid, dtype=dtype)]
    with torch.no_grad():
        wanted = attend(*(x.double() for x in given), grid, encoding, backend="reference")
        for backend in ("triton", UNFUSED):
            poison()
            got = attend(*given, grid, encoding, backend=backend)
            agree([got], [wanted], TOLERANCE[dtype], backend)


@pytest.mark.skipif(DEVICE != "cuda", reason="its kernels run on CUDA devices")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "deberta"])
def test_flex(name: str, layout: str) -> None:
    """Tables and products over few rows, causal or within a window."""
    grid = Grid.of(
        LAYOUTS[layout].to(DEVICE),
        causal=layout != "packed",
        window=33 if layout == "packed" else None,
    )
    check(created(name, causal=grid.causal), grid, inputs(grid), ("flex",))


@pytest.mark.skipif(DEVICE != "cuda", reason="its kernels run on CUDA devices")
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_flex_with_sinks_and_caps(softcap: float | None) -> None:
    grid = Grid.of(LAYOUTS["packed"].to(DEVICE), causal=True)
    sinks = torch.linspace(-1, 2, HEADS, device=DEVICE).requires_grad_()
    given = inputs(grid, dtype=torch.bfloat16)
    check(created("alibi"), grid, given, ("flex",), sinks=sinks, softcap=softcap)


@pytest.mark.usefixtures("measured_tiles")
@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_every_run_gives_the_same_bits(name: str) -> None:
    grid, encoding = Grid.of(LAYOUTS["padded"].to(DEVICE), causal=True), created(name)
    given = inputs(grid, dtype=torch.bfloat16)
    first, again = (run("triton", given, grid, encoding) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_dropout_is_the_same_in_both_directions() -> None:
    """Along any direction the gradients are what the outputs of one seed change by."""
    grid, encoding = Grid.of(LAYOUTS["sequence"].to(DEVICE), causal=True), created("t5")
    given = inputs(grid)
    learned = [*given, *encoding.parameters()]
    slopes = [torch.randn_like(x) for x in learned]

    def output() -> Tensor:
        torch.manual_seed(5)
        return attend(*given, grid, encoding, backend="triton", dropout=0.3).double().sum()

    gradients = torch.autograd.grad(output(), learned)
    step = 1e-3
    ends = []
    with torch.no_grad():
        for move in (step, -2 * step):
            for x, slope in zip(learned, slopes, strict=True):
                x.add_(slope, alpha=move)
            ends.append(output().item())
    measured = (ends[0] - ends[1]) / (2 * step)
    expected = sum((g * s).double().sum().item() for g, s in zip(gradients, slopes, strict=True))
    assert measured == pytest.approx(expected, rel=2e-2)


@pytest.mark.skipif(DEVICE != "cuda", reason="there is no device to wait for")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*STRUCTURED, "fire", "kerple", "forgetting"])
def test_later_calls_wait_for_nothing(name: str, layout: str) -> None:
    """Layouts are read once, and constants stay on the device."""
    where, encoding = LAYOUTS[layout].to(DEVICE), created(name)
    x = torch.randn(where.batch, LENGTH, HEADS * WIDTH, device=DEVICE)
    learned = [p for p in encoding.parameters() if p.requires_grad]
    given = inputs(Grid.of(where), dtype=torch.bfloat16)

    prepared = Prepared()

    def call() -> None:
        grid = Grid.of(encoding.observe(x, where), causal=True)
        with prepared:
            output = attend(*given, grid, encoding, backend="triton")
        torch.autograd.grad(output.sum(), [*given, *learned], allow_unused=True)

    call()
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on devices")
@pytest.mark.parametrize("name", ["rope", "t5", "shaw"])
def test_captured_in_a_graph(name: str) -> None:
    grid, encoding = Grid.of(LAYOUTS["packed"].to(DEVICE), causal=True), created(name)
    given, graph = [x.detach() for x in inputs(grid)], torch.cuda.CUDAGraph()
    with torch.no_grad(), Prepared():
        attend(*given, grid, encoding, backend="triton")
        with torch.cuda.graph(graph):
            got = attend(*given, grid, encoding, backend="triton")
        for x in given:
            x.normal_()
        graph.replay()
        agree([got], [attend(*given, grid, encoding, backend="triton")], 1e-5, "captured")


def test_compiled_equals_eager() -> None:
    grid, encoding = Grid.of(LAYOUTS["sequence"].to(DEVICE), causal=True), created("t5")
    given = inputs(grid)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="triton")

    learned = [*given, *encoding.parameters()]
    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        output = function(*given)
        results.append([output, *torch.autograd.grad(output.sin().sum(), learned)])
    agree(results[1], results[0], 1e-5, "compiled")


@pytest.mark.parametrize("layout", ["sequence", "padded"])
@pytest.mark.parametrize("name", [*STRUCTURED, "fire"])
def test_decoding(name: str, layout: str) -> None:
    """One query against a long cache, keys in shares."""
    length = 5000
    past = {
        "sequence": Layout.sequence(length, device=DEVICE),
        "padded": Layout.padded([length, 77], side="left").to(DEVICE),
    }[layout]
    grid = Grid(past.slice(length - 1, length), past, causal=True)
    encoding = created(name, length=length)
    with torch.no_grad():
        given = [x.detach() for x in inputs(grid)]
        assert "one query" in str(explain(*given, grid, encoding, backend="triton"))
        wanted = attend(*(x.double() for x in given), grid, encoding, backend="reference")
        poison()
        got = attend(*given, grid, encoding, backend="triton")
    agree([got], [wanted], TOLERANCE[torch.float32], "triton")


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter would take hours")
@pytest.mark.parametrize("name", ["alibi", "t5", "shaw"])
def test_long_sequences_in_one_call(name: str) -> None:
    """The last queries against the definition; memory far below that of all logits."""
    layout, last = Layout.sequence(LONG, device=DEVICE), LONG - 64
    whole, end = Grid.of(layout, causal=True), Grid(layout.slice(last, LONG), layout, causal=True)
    encoding = created(name)
    given = inputs(whole, dtype=torch.bfloat16)
    learned = [*given, *(p for p in encoding.parameters() if p.requires_grad)]
    poison()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = attend(*given, whole, encoding, backend="triton")[:, :, last:]
    gradients = torch.autograd.grad(output.double().sin().sum(), learned)
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
    part = [given[0].detach()[:, :, last:], *(x.detach() for x in given[1:])]
    wide = [x.double().requires_grad_() for x in part]
    wanted = run("reference", wide, end, encoding)
    assert not gradients[0][:, :, :last].any()
    found = [output, gradients[0][:, :, last:], *gradients[1:]]
    agree(found, wanted, TOLERANCE[torch.bfloat16], "triton")


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter would take hours")
def test_tensors_of_more_than_two_billion_numbers() -> None:
    """Places in memory do not fit in 32 bits: the last head against the definition."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs a device with 40 GiB of memory")
    heads, queries = 2**31 // (LONG * 128) + 2, 32
    layout = Layout.sequence(LONG, device=DEVICE)
    grid = Grid(layout.slice(LONG - queries, LONG), layout, causal=True)
    given = inputs(grid, dtype=torch.bfloat16, width=128, heads=(heads, heads))
    encoding = posenc.create("t5", heads=heads, causal=True).to(DEVICE)
    last = [x.detach()[:, -1:].double().requires_grad_() for x in given]
    alone = posenc.create("t5", heads=1, causal=True).to(DEVICE)
    with torch.no_grad():
        for mine, theirs in zip(alone.parameters(), encoding.parameters(), strict=True):
            mine.copy_(theirs[-1:] if theirs.shape[0] == heads else theirs[..., -1:])
    wanted = run("reference", last, grid, alone)[:4]
    output = attend(*given, grid, encoding, backend="triton")
    gradients = torch.autograd.grad(output[:, -1:].double().sin().sum(), given)
    found = [output[:, -1:], *(x[:, -1:] for x in gradients)]
    agree(found, wanted, TOLERANCE[torch.bfloat16], "triton")
