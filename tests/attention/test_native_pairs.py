"""The compiled kernels' terms of pairs outside the structured form: by heads, gates, networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc.attention import attend, explain
from posenc.attention.backends.native import splitting
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built, cast, compare, draw, results
from tests.attention.test_native import DIM, HEADS, METHODS, WIDTH, check, last, make, observed
from tests.testing.tolerances import distance, tolerance

pytestmark = [built, pytest.mark.usefixtures("poisoned")]

PAIRS = list(METHODS)[9:]
"""Methods whose terms of pairs are not of the structured form."""

PATH_GRIDS = [
    last(300, 300, causal=True),
    Grid(Layout.sequence(100, start=190), Layout.sequence(300), causal=True),
    Grid.of(Layout.packed([20, 150, 44]), causal=True),
    Grid.of(Layout.padded([200, 20], side="left"), causal=True, window=70),
]


@pytest.mark.parametrize("window", [(None, -3), (-90, -70), (None, -65)])
@pytest.mark.parametrize("layout", [Layout.sequence(130), Layout.padded([130, 100], side="left")])
def test_path_where_own_keys_are_hidden(layout: Layout, window: tuple[int, int]) -> None:
    """No block before a hidden one is reached by queries that nothing has transformed."""
    encoding, x = make("path").double(), torch.randn(2, 130, DIM, dtype=torch.float64)
    layout = encoding.observe(x, layout)
    before = torch.stack([layout.order - 90, layout.order - 70], dim=-1)
    inputs = [x.detach() for x in draw(130, 130, rows=2)]
    for grid in (Grid.of(layout, window=window), Grid.of(layout, causal=True).within(before)):
        expected = attend(*inputs, grid, encoding, backend="reference")
        torch.testing.assert_close(attend(*inputs, grid, encoding), expected)
        with pytest.raises(BackendRefusal, match="own keys"):
            attend(*inputs, grid, encoding, backend="native")


@pytest.mark.parametrize("grid", PATH_GRIDS)
def test_path_by_heads(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of some heads and blocks at a time, as in long sequences."""
    monkeypatch.setattr(splitting, "MANY", 1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tolerance = {torch.float64: 1e-9, torch.bfloat16: 0.04}.get(dtype, 3e-5)
        check("path", grid, dtype=dtype, tolerance=tolerance)


def test_path_by_heads_differentiates_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MANY", 1)
    encoding = make("path").requires_grad_(False)
    compare(
        draw(70, 70),
        observed(encoding, last(70, 70, causal=True), torch.ones(2, 70, DIM)),
        encoding,
    )


@pytest.mark.parametrize("name", ["forgetting", "cable"])
def test_documents_with_signals(name: str) -> None:
    for layout in (Layout.packed([20, 1, 44]), Layout.padded([65, 20], side="left")):
        for window in (None, 9):
            grid = Grid.of(layout, causal=True, window=window)
            check(name, grid, dtype=torch.float64, tolerance=1e-9)


@pytest.mark.parametrize("name", ["forgetting", "cable", "transformer_xl", "grape_additive"])
def test_gradients_of_sums_by_key_are_as_exact_as_the_definition(name: str) -> None:
    options = {"transformer_xl": {"dim": 32, "heads": HEADS, "head_dim": WIDTH}}
    torch.manual_seed(3)
    encoding = posenc.create(name, **options.get(name, {"dim": 32, "heads": HEADS}))
    grid, x = Grid.of(Layout.sequence(700), causal=True), torch.randn(1, 700, 32)
    inputs = draw(700, 700, groups=HEADS, rows=1)
    found = []
    for backend, dtype in (
        ("native", torch.float32),
        ("reference", torch.float32),
        ("reference", torch.float64),
    ):
        encoding.to(dtype)
        seen = observed(encoding, grid, x.to(dtype))
        found.append(results(cast(inputs, dtype), seen, encoding, backend))
    for got, reference, exact in zip(*found, strict=True):
        assert distance(got, exact) <= tolerance(reference, exact)


def test_path_takes_queries_that_are_among_the_keys() -> None:
    encoding, grid = make("path"), Grid(Layout.sequence(20), Layout.sequence(30, start=12), True)
    seen = observed(encoding, grid, torch.randn(2, 30, 32))
    inputs = draw(20, 30)
    with pytest.raises(BackendRefusal, match="no form that the kernels take"):
        attend(*inputs, seen, encoding, backend="native")
    assert attend(*inputs, seen, encoding).shape == inputs[0].shape


@pytest.mark.parametrize("name", ["cope", "stick_breaking"])
def test_small_gates_are_carried_over_many_tiles(name: str) -> None:
    q, k, v = draw(1100, 1100, groups=1, heads=2, rows=1)
    inputs = cast([q.abs(), k - 2, v], torch.float64)
    compare(inputs, last(1100, 1100, causal=True), make(name).double(), tolerance=1e-9)


@pytest.mark.parametrize("count", [1, 6, 12, 13])
def test_networks_of_any_number_of_heads(count: int) -> None:
    encoding = posenc.create("dape", heads=count, hidden=7)
    for parameter in encoding.double().parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    inputs = draw(70, 70, heads=count, groups=count, dtype=torch.float64)
    compare(inputs, last(70, 70), encoding, tolerance=1e-6)


@pytest.mark.parametrize(
    ("name", "apart"), [*((name, False) for name in ("shaw", *PAIRS)), ("path", True)]
)
def test_the_mask_of_dropout_is_that_of_the_backward_pass(
    name: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "MANY", 1 if apart else 2**30)
    encoding, layout = make(name).double(), Layout.sequence(65)
    grid = observed(encoding, Grid.of(layout, causal=True), torch.randn(2, 65, 32).double())
    inputs = [x.detach().double() for x in draw(65, 65, groups=4)]

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


def test_heads_that_are_computed_apart_drop_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MANY", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # a head at a time
    encoding, grid = make("path"), Grid.of(Layout.sequence(65), causal=True)
    grid = observed(encoding, grid, torch.randn(2, 65, 32))
    q, k, _ = draw(65, 65, groups=4)
    weights = attend(
        q, k, torch.eye(65).expand(2, 4, -1, -1), grid, encoding, backend="native", dropout=0.5
    )
    kept = weights != 0
    alike = (kept[:, 1:] == kept[:, :1]) & grid.visible
    assert 0.4 < alike.sum() / (6 * grid.visible.sum()) < 0.6


@pytest.mark.parametrize("layer", ["input", "output"])
@pytest.mark.parametrize("name", ["fire", "dape"])
def test_adapted_layers_are_called(name: str, layer: str) -> None:
    """Hooks, adapters and quantizers compute with more than a layer's weights."""
    encoding, tensors = posenc.create(name, **METHODS[name]), draw(300, 300)
    grid = last(300, 300, causal=True)
    before = attend(*tensors, grid, encoding)
    assert explain(*tensors, grid, encoding).backend == "native"
    getattr(encoding.score, layer).register_forward_hook(lambda *given: 3 * given[-1])
    found = attend(*tensors, grid, encoding)
    expected = attend(*tensors, grid, encoding, backend="reference")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert distance(found, before) > 1e-2


@pytest.mark.parametrize("name", ["fire", "dape"])
def test_layers_of_other_functions_are_called(name: str) -> None:
    """A stack of PyTorch's layers has no weight, and a layer without bias none to add."""
    tensors, grid = draw(300, 300), last(300, 300, causal=True)
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
