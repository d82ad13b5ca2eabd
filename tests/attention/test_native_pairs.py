"""The compiled kernels' terms of pairs outside the structured form, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc.attention import attend, explain
from posenc.attention.backends.native import splitting
from posenc.encoding import Encoding
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.test_native import _agree, _both, _inputs, built
from tests.support.exhaustive import in_turn
from tests.testing.rounding import rounded_logits
from tests.testing.tolerances import agree_within, distance, tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

WIDTH, HEADS = 24, 4

METHODS: dict[str, dict[str, object]] = {
    "fire": {"heads": HEADS, "hidden": 9, "threshold": 20.0},
    "cope": {"head_dim": WIDTH, "max_count": 20},
    "dape": {"heads": HEADS, "hidden": 7},
    "grape_additive": {"dim": 32, "heads": HEADS},
    "grape_additive, wide": {"dim": 32, "heads": HEADS, "width": 18},
    "dape, of alibi": {"heads": HEADS, "bias": "alibi"},
    "path": {"dim": 32, "heads": HEADS, "head_dim": WIDTH, "rank": 6},
    "stick_breaking": {},
    "stick_breaking, no remainder": {"remainder": "none"},
}

KEYS = Layout.sequence(300)

PATH_GRIDS = [
    Grid.of(KEYS, causal=True),
    Grid(KEYS.slice(190, 290), KEYS, causal=True),
    Grid.of(Layout.packed([20, 150, 44]), causal=True),
    Grid.of(Layout.padded([200, 20], side="left"), causal=True, window=70),
]

SIZES = {
    f"{q} of {k}": [q, k] for q, k in ((1, 1), (1, 65), (63, 63), (65, 65), (30, 65), (40, 600))
}
MANY = {"800 of 800": [800, 800], "300 of 1100": [300, 1100]}
"""Queries and keys, in a tile or a few, and in many."""

HALVES = [torch.bfloat16, torch.float16]


def _encoding(name: str) -> Encoding:
    torch.manual_seed(3)
    options = METHODS.get(name, {"dim": 32, "heads": HEADS})
    encoding = posenc.create(name.partition(",")[0], **options)
    for key, parameter in encoding.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("scale" in key or "stretch" in key), std=0.4)
    return encoding


def _check(
    name: str,
    grid: Grid,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 3e-5,
    rows: int = 2,
) -> None:
    encoding = _encoding(name)
    rows = max(rows, grid.query.batch)
    inputs = [x.detach().to(dtype) for x in _inputs(grid.query.length, grid.key.length, rows=rows)]
    signals = torch.randn(rows, max(grid.query.length, grid.key.length), 32)
    wide = torch.promote_types(dtype, torch.float32)
    found = []
    for kind, of_encoding, backend in (
        (torch.float64, torch.float64, "reference"),
        (dtype, wide, "native"),
    ):
        encoding.to(of_encoding)
        q, k, v = (x.to(kind).requires_grad_() for x in inputs)
        seen = _observed(encoding, grid, signals.to(of_encoding))
        found.append(_results((q, k, v), seen, encoding, backend))
    bounds = [tolerance] * len(found[0])
    if dtype in HALVES:
        for back, (key, _) in enumerate(reversed(list(encoding.named_parameters())), 1):
            if key.endswith("output.bias"):  # zero but for the rounding of the outputs
                bounds[-back] = 0.1

    def definition() -> list[Tensor]:
        with rounded_logits(torch.finfo(dtype).eps, 0):
            return _results((q, k, v), seen, encoding, "reference")

    agree_within(bounds, found[1], found[0], definition)


def _results(
    inputs: tuple[Tensor, Tensor, Tensor], grid: Grid, encoding: Encoding, backend: str
) -> list[Tensor]:
    """Output, LSE if there is one, and all gradients."""
    if encoding.score is None or not encoding.score.replaces_softmax:
        return _both(inputs, grid, encoding, backend)
    output = attend(*inputs, grid, encoding, backend=backend)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs, materialize_grads=True)]


def _observed(encoding: Encoding, grid: Grid, x: Tensor) -> Grid:
    keys = encoding.observe(x[:, -grid.key.length :], grid.key)
    queries = encoding.observe(x[:, -grid.query.length :], grid.query)
    return Grid(queries, keys, grid.causal, grid.window)


@built
@pytest.mark.parametrize(("name", "size"), in_turn(3, list(METHODS), SIZES))
def test_values_and_gradients(name: str, size: list[int]) -> None:
    keys = Layout.sequence(size[1])
    queries = keys.slice(size[1] - size[0], size[1])
    for dtype in (torch.float64, torch.float32):
        _check(name, Grid(queries, keys, causal=True), dtype=dtype)
    if not _encoding(name).causal_only:
        _check(name, Grid(queries, keys))


@built
@pytest.mark.parametrize("name", METHODS)
def test_windows_documents_and_padding(name: str) -> None:
    for causal in (True,) if _encoding(name).causal_only else (False, True):
        _check(name, Grid.of(Layout.sequence(70, start=7), causal=causal, window=6))
        _check(name, Grid.of(Layout.packed([20, 1, 44]), causal=causal))
        _check(name, Grid.of(Layout.padded([65, 20], side="left"), causal=causal, window=9))
        _check(name, Grid.of(Layout.padded([40, 65]), causal=causal))


@built
@pytest.mark.parametrize("name", [name for name in METHODS if name != "path"])
def test_queries_that_see_no_key(name: str) -> None:
    _check(name, Grid(Layout.sequence(20), Layout.sequence(30, start=12), causal=True))
    _check(name, Grid(Layout.sequence(60, start=5), Layout.sequence(40), causal=True, window=1))


@built
@pytest.mark.parametrize("window", [(None, -3), (-90, -70), (None, -65)])
@pytest.mark.parametrize("layout", [Layout.sequence(130), Layout.padded([130, 100], side="left")])
def test_path_where_own_keys_are_hidden(layout: Layout, window: tuple[int, int]) -> None:
    """No block before a hidden one is reached by queries that nothing has transformed."""
    encoding, x = _encoding("path").double(), torch.randn(2, 130, 32, dtype=torch.float64)
    layout = encoding.observe(x, layout)
    before = torch.stack([layout.order - 90, layout.order - 70], dim=-1)
    inputs = [x.detach() for x in _inputs(130, 130, rows=2)]
    for grid in (Grid.of(layout, window=window), Grid.of(layout, causal=True).within(before)):
        expected = attend(*inputs, grid, encoding, backend="reference")
        torch.testing.assert_close(attend(*inputs, grid, encoding), expected)
        with pytest.raises(BackendRefusal, match="own keys"):
            attend(*inputs, grid, encoding, backend="native")


@built
@pytest.mark.parametrize("grid", PATH_GRIDS)
def test_path_by_heads(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of some heads and blocks at a time, as in long sequences."""
    monkeypatch.setattr(splitting, "MANY", 1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tolerance = {torch.float64: 1e-9, torch.bfloat16: 0.04}.get(dtype, 3e-5)
        _check("path", grid, dtype=dtype, tolerance=tolerance)


@built
def test_path_by_heads_differentiates_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MANY", 1)
    encoding, grid = (
        _encoding("path").requires_grad_(False),
        Grid.of(Layout.sequence(70), causal=True),
    )
    inputs = _inputs(70, 70)
    found = []
    for backend in ("native", "reference"):
        output = attend(
            *inputs, _observed(encoding, grid, torch.ones(2, 70, 32)), encoding, backend=backend
        )
        found.append(list(torch.autograd.grad(output.square().sum(), inputs)))
    _agree(*found)


@built
@pytest.mark.parametrize("name", ["forgetting", "cable"])
def test_documents_with_signals(name: str) -> None:
    for layout in (Layout.packed([20, 1, 44]), Layout.padded([65, 20], side="left")):
        for window in (None, 9):
            grid = Grid.of(layout, causal=True, window=window)
            _check(name, grid, dtype=torch.float64, tolerance=1e-9)


@built
@pytest.mark.parametrize("name", ["forgetting", "cable", "transformer_xl", "grape_additive"])
def test_gradients_of_sums_by_key_are_as_exact_as_the_definition(name: str) -> None:
    options = {"transformer_xl": {"dim": 32, "heads": HEADS, "head_dim": WIDTH}}
    torch.manual_seed(3)
    encoding = posenc.create(name, **options.get(name, {"dim": 32, "heads": HEADS}))
    grid, x = Grid.of(Layout.sequence(700), causal=True), torch.randn(1, 700, 32)
    inputs = _inputs(700, 700, groups=HEADS, rows=1)
    found = []
    for backend, dtype in (
        ("native", torch.float32),
        ("reference", torch.float32),
        ("reference", torch.float64),
    ):
        encoding.to(dtype)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
        seen = _observed(encoding, grid, x.to(dtype))
        found.append(_results((q, k, v), seen, encoding, backend))
    for got, reference, exact in zip(*found, strict=True):
        assert distance(got, exact) <= tolerance(reference, exact)


@built
def test_path_takes_queries_that_are_among_the_keys() -> None:
    encoding, grid = (
        _encoding("path"),
        Grid(Layout.sequence(20), Layout.sequence(30, start=12), True),
    )
    seen = _observed(encoding, grid, torch.randn(2, 30, 32))
    inputs = _inputs(20, 30)
    with pytest.raises(BackendRefusal, match="no form that the kernels take"):
        attend(*inputs, seen, encoding, backend="native")
    assert attend(*inputs, seen, encoding).shape == inputs[0].shape


@built
@pytest.mark.parametrize(("name", "size"), in_turn(1, list(METHODS), MANY))
def test_many_tiles(name: str, size: list[int]) -> None:
    keys = Layout.sequence(size[1])
    grid = Grid(keys.slice(size[1] - size[0], size[1]), keys, causal=True)
    _check(name, grid, dtype=torch.float64, rows=1)


@built
@pytest.mark.parametrize("name", ["cope", "stick_breaking"])
def test_small_gates_are_carried_over_many_tiles(name: str) -> None:
    encoding, grid = _encoding(name).double(), Grid.of(Layout.sequence(1100), causal=True)
    q, k, v = (x.detach().double() for x in _inputs(1100, 1100, groups=1, heads=2, rows=1))
    tokens = [(x - shift).requires_grad_() for x, shift in ((q.abs(), 0), (k, 2), (v, 0))]
    inputs = (tokens[0], tokens[1], tokens[2])
    expected = _results(inputs, grid, encoding, "reference")
    _agree(_results(inputs, grid, encoding, "native"), expected, 1e-9)


@built
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", METHODS)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    _check(name, Grid.of(Layout.sequence(65), causal=True), dtype=dtype, tolerance=0.04)


@built
@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_of_any_shape(name: str) -> None:
    """By AMX where the processor has it."""
    # Rows of gradients sum to 0 but for the rounding of outputs, which reaches networks too.
    keys, bound = Layout.sequence(600), 0.1 if name.startswith("dape") else 0.06
    for grid in (
        Grid(keys.slice(567, 600), keys, causal=True),
        Grid.of(Layout.sequence(150), causal=True, window=20),
        Grid.of(Layout.packed([20, 1, 44]), causal=True),
        Grid.of(Layout.padded([65, 20], side="left"), causal=True),
    ):
        _check(name, grid, dtype=torch.bfloat16, tolerance=bound)


@built
@pytest.mark.parametrize("count", [1, 6, 12, 13])
def test_networks_of_any_number_of_heads(count: int) -> None:
    encoding, grid = posenc.create("dape", heads=count, hidden=7), Grid.of(Layout.sequence(70))
    for parameter in encoding.double().parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    q, k, v = (x.detach().double() for x in _inputs(70, 70, heads=count, groups=count))
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    expected = _both(inputs, grid, encoding, "reference")
    _agree(_both(inputs, grid, encoding, "native"), expected, 1e-6)


@built
@pytest.mark.parametrize(("name", "apart"), [*((name, False) for name in METHODS), ("path", True)])
def test_the_mask_of_dropout_is_that_of_the_backward_pass(
    name: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "MANY", 1 if apart else 2**30)
    encoding, layout = _encoding(name).double(), Layout.sequence(65)
    grid = _observed(encoding, Grid.of(layout, causal=True), torch.randn(2, 65, 32).double())
    inputs = [x.detach().double() for x in _inputs(65, 65, groups=4)]

    def seeded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(2)
        return attend(q, k, v, grid, encoding, backend="native", dropout=0.3).sin().sum()

    steps = [torch.randn_like(x) for x in inputs]
    given = [x.clone().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(seeded(*given), given)
    with torch.no_grad():
        ends = [
            seeded(*(x + e * s for x, s in zip(inputs, steps, strict=True))) for e in (1e-6, -1e-6)
        ]
    slope = sum(float((g * s).sum()) for g, s in zip(gradients, steps, strict=True))
    assert slope == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-5)


@built
def test_heads_that_are_computed_apart_drop_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MANY", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # a head at a time
    encoding, grid = _encoding("path"), Grid.of(Layout.sequence(65), causal=True)
    grid = _observed(encoding, grid, torch.randn(2, 65, 32))
    q, k, _ = _inputs(65, 65, groups=4)
    weights = attend(
        q, k, torch.eye(65).expand(2, 4, -1, -1), grid, encoding, backend="native", dropout=0.5
    )
    kept = weights != 0
    alike = (kept[:, 1:] == kept[:, :1]) & grid.visible
    assert 0.4 < alike.sum() / (6 * grid.visible.sum()) < 0.6


@built
@pytest.mark.parametrize("name", METHODS)
def test_explain_names_it(name: str) -> None:
    encoding, grid = _encoding(name), Grid.of(Layout.sequence(33), causal=True)
    seen = _observed(encoding, grid, torch.randn(2, 33, 32))
    assert "compiled" in explain(*_inputs(33, 33), seen, encoding, backend="native").how


@built
@pytest.mark.parametrize("layer", ["input", "output"])
@pytest.mark.parametrize("name", ["fire", "dape"])
def test_adapted_layers_are_called(name: str, layer: str) -> None:
    """Hooks, adapters and quantizers compute with more than a layer's weights."""
    encoding, tensors = posenc.create(name, **METHODS[name]), _inputs(300, 300)
    grid = Grid.of(KEYS, causal=True)
    before = attend(*tensors, grid, encoding)
    assert explain(*tensors, grid, encoding).backend == "native"
    getattr(encoding.score, layer).register_forward_hook(lambda *given: 3 * given[-1])
    found = attend(*tensors, grid, encoding)
    expected = attend(*tensors, grid, encoding, backend="reference")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert distance(found, before) > 1e-2


@built
@pytest.mark.parametrize("name", ["fire", "dape"])
def test_layers_of_other_functions_are_called(name: str) -> None:
    """A stack of PyTorch's layers has no weight, and a layer without bias none to add."""
    tensors, grid = _inputs(300, 300), Grid.of(KEYS, causal=True)
    for without_bias in (False, True):
        encoding = posenc.create(name, **METHODS[name])
        assert encoding.score is not None
        plain = encoding.score.get_submodule("input")
        if without_bias:
            plain.register_parameter("bias", None)
        else:
            encoding.score.input = torch.nn.Sequential(plain, torch.nn.Tanh())
        expected = attend(*tensors, grid, encoding, backend="reference")
        found = attend(*tensors, grid, encoding)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
