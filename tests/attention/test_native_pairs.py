"""The compiled kernels' terms of pairs outside the structured form: by heads, gates, networks."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc.attention import attend, explain
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built, cast, compare, draw, results
from tests.attention.test_native import DIM, HEADS, WIDTH, last, make, observed
from tests.testing.tolerances import distance, tolerance

pytestmark = [built, pytest.mark.usefixtures("poisoned")]


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


@pytest.mark.parametrize("name", ["forgetting", "cable", "transformer_xl", "grape_additive"])
def test_gradients_of_sums_by_key_are_as_exact_as_the_definition(name: str) -> None:
    torch.manual_seed(3)
    encoding = posenc.create(name, dim=DIM, heads=HEADS, head_dim=WIDTH)
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


def test_rows_of_a_batch_are_measured_by_their_queries_positions() -> None:
    encoding = posenc.create("fire", heads=HEADS, threshold=3.0)
    layout = Layout.padded([70, 9, 40], side="left")
    compare(draw(70, 70, rows=3), Grid.of(layout, causal=True), encoding)


@pytest.mark.parametrize("layer", ["input", "output"])
@pytest.mark.parametrize("name", ["fire", "dape"])
def test_adapted_layers_are_called(name: str, layer: str) -> None:
    """Hooks, adapters and quantizers compute with more than a layer's weights."""
    encoding, tensors = make(name), draw(300, 300)
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
        encoding = make(name)
        assert encoding.score is not None
        plain = encoding.score.get_submodule("input")
        if without_bias:
            plain.register_parameter("bias", None)
        else:
            encoding.score.input = torch.nn.Sequential(plain, torch.nn.Tanh())
        expected = attend(*tensors, grid, encoding, backend="reference")
        found = attend(*tensors, grid, encoding)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
