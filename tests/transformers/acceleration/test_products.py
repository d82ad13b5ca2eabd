"""Linear layers by other products: the same numbers, where they are used, and as they were."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posenc.attention.backends.native.build import missing
from posenc.errors import UnknownNameError
from posenc.transformers.acceleration import accelerate, products, restore
from posenc.transformers.acceleration.api import ALREADY
from tests.testing.tiny_models import inputs_of, tiny_config

WIDTH, OUTPUTS = 32, 48

Layer = Any


NAMES = ("oneDNN", "posenc")


@pytest.fixture(params=NAMES, autouse=True)
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that serves few rows."""
    if request.param == "oneDNN":
        monkeypatch.setattr(products, "MOST_READ", 0)
    elif missing() is not None:
        pytest.skip("posenc's kernels are not built")
    name: str = request.param
    return name


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The name and the shape of the input of each product other than PyTorch's."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def counted(name: str, compute: products.Product) -> products.Product:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            found.append((name, tuple(x.shape)))
            return compute(x, weight, bias)

        return product

    for name, compute in products.PRODUCTS.items():
        monkeypatch.setitem(products.PRODUCTS, name, counted(name, compute))
    return found


def linear() -> Layer:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, OUTPUTS)


def of_gpt2() -> Layer:
    torch.manual_seed(0)
    layer = Conv1D(OUTPUTS, WIDTH)
    nn.init.normal_(layer.bias)
    return layer


def without_bias() -> Layer:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, OUTPUTS, bias=False)


def with_strided_bias() -> Layer:
    layer = linear()
    layer.bias = nn.Parameter(torch.randn(2 * OUTPUTS)[::2])
    return layer


def of_a_larger_weight() -> Layer:
    layer = linear()
    layer.weight = nn.Parameter(torch.randn(2 * OUTPUTS, WIDTH)[::2])
    return layer


INPUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(7, WIDTH),
    "batch": lambda: torch.randn(2, 3, 5, WIDTH),
    "one": lambda: torch.randn(WIDTH),
    "none": lambda: torch.randn(2, 0, WIDTH),
    "transposed": lambda: torch.randn(WIDTH, 7).T,
    "swapped": lambda: torch.randn(3, 5, WIDTH).transpose(0, 1),
    "expanded": lambda: torch.randn(1, WIDTH).expand(6, -1),
    "every second": lambda: torch.randn(6, 2 * WIDTH)[:, ::2],
    "infinite": lambda: torch.full((2, WIDTH), torch.inf),
}

MADE = (linear, of_gpt2, without_bias, with_strided_bias, of_a_larger_weight)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("given", INPUTS)
def test_products_are_those_of_pytorch(make: Callable[[], Layer], given: str) -> None:
    layer, x = make(), INPUTS[given]()
    if make is of_gpt2 and given == "swapped":
        pytest.skip("transformers' own layer takes no such input")
    expected = deepcopy(layer).double()(x.double())
    products.take_products(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected.float(), equal_nan=True)
        assert layer(x).shape == expected.shape


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_other_products_are_without_gradients_alone(
    make: Callable[[], Layer], product: str, computed: list[tuple[str, tuple[int, ...]]]
) -> None:
    """What a bias with gaps would be read as is a different number: it is PyTorch's."""
    layer = make()
    products.take_products(layer)
    computed.clear()
    x = torch.randn(3, WIDTH)
    layer(x).sum().backward()
    assert not computed
    with torch.no_grad():
        layer(x)
        layer(**{"x" if isinstance(layer, Conv1D) else "input": x})
    served = make in (linear, of_gpt2, without_bias)
    name = "oneDNN" if make is of_gpt2 else product
    assert computed == [(name, (3, WIDTH))] * (2 if served else 0)
    layer.zero_grad()
    layer.requires_grad_(False)
    layer(x)
    assert len(computed) == (3 if served else 0)
    layer(x.requires_grad_()).sum().backward()
    assert len(computed) == (3 if served else 0)
    if layer.bias is not None:
        layer.bias.requires_grad_()
        layer(x.detach()).sum().backward()
        assert layer.bias.grad is not None
        assert layer.bias.grad.unique().tolist() == [3.0]


@pytest.mark.parametrize("make", [linear, of_gpt2], ids=lambda make: make.__name__)
def test_edits_of_weights_are_seen(make: Callable[[], Layer]) -> None:
    """Those too that leave no trace in the parameter."""
    layer = make().requires_grad_(False)
    products.take_products(layer)
    x = torch.randn(3, WIDTH)
    layer(x)
    layer.weight.data[1, 2] += 1
    layer.weight.numpy()[0, 3] -= 2
    layer.bias.numpy()[4] = 5
    expected = deepcopy(layer).double()
    restore(expected)
    torch.testing.assert_close(layer(x), expected(x.double()).float())
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight), requires_grad=False)
    assert torch.equal(layer(x), layer.bias.expand(3, -1))


@pytest.mark.parametrize(("outputs", "inputs"), [(47, 32), (48, 31), (8, 32), (48, 16), (1, 1)])
def test_weights_of_another_size_afterwards(outputs: int, inputs: int) -> None:
    """Of which posenc has no kernel."""
    layer = without_bias()
    products.take_products(layer)
    layer.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)
    x = torch.randn(3, inputs)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)


def test_contexts_that_pytorch_watches(computed: list[tuple[str, tuple[int, ...]]]) -> None:
    layer = linear().requires_grad_(False)
    products.take_products(layer)
    x, weight = torch.randn(3, WIDTH), layer.weight
    computed.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    rows = torch.func.vmap(layer)(x)
    torch.testing.assert_close(rows, x @ weight.T + layer.bias)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, weight.sum(1).expand(3, -1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that jit is deprecated
        traced = torch.jit.trace(layer, x, check_trace=False)
    assert "mkldnn" not in str(traced.graph)
    program = torch.export.export(layer, (x,))
    assert "mkldnn" not in str(program.graph)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x @ weight.T + layer.bias)
    with pytest.raises(RuntimeError):
        layer(x.double())
    assert not computed


def test_rows_decide(
    computed: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["posenc", "", "oneDNN", "", "oneDNN", ""]
    fastest = tuple((name, factor + 1.5) for factor, name in enumerate(names))
    monkeypatch.setattr(products, "trial", lambda *shape, **options: fastest)
    layer = linear()
    said = products.take_products(layer)
    assert all(f"{factor:.1f}" in said for _, factor in fastest)
    assert "oneDNN or posenc" in said
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 7, 8, 63, 64, 511, 512, 600):
            layer(torch.randn(1, rows, WIDTH))
    used = [("posenc", 1), ("oneDNN", 4), ("oneDNN", 7), ("oneDNN", 64), ("oneDNN", 511)]
    assert [(name, shape[1]) for name, shape in computed] == used


def test_processors_without_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "trial", lambda *shape, **options: (("", 1.0),) * 6)
    model = transformers.AutoModel.from_config(tiny_config("bert")).eval()
    assert "PyTorch's" in accelerate(model).linear
    assert not products.products_of(model)


def test_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape and dtype, once; they draw none of the user's random numbers."""
    monkeypatch.undo()  # what conftest puts in place of trials
    products.trial.cache_clear()
    state = torch.get_rng_state()
    options: dict[str, Any] = {"by_input": False, "threads": torch.get_num_threads()}
    fastest = products.trial(OUTPUTS, WIDTH, torch.float32, **options)
    assert len(fastest) == len(products.ROWS)
    for name, factor in fastest:
        assert factor * products.GAIN >= 0.999 if name else factor == 1
    assert torch.equal(torch.get_rng_state(), state)
    products.trial(OUTPUTS, WIDTH, torch.float32, **options)
    assert products.trial.cache_info().hits == 1
    products.trial.cache_clear()


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"oneDNN": 0.02, "posenc": 0.03}, ("", 1.0)),
        ({"oneDNN": 0.0149, "posenc": 0.0148}, ("", 1.0)),
        ({"oneDNN": 0.01, "posenc": 0.014}, ("oneDNN", 1.5)),
        ({"oneDNN": 0.014, "posenc": 0.005}, ("posenc", 3.0)),
        ({"oneDNN": -1, "posenc": 0.01}, ("posenc", 1.5)),
    ],
)
def test_the_fastest_is_used(
    times: dict[str, float], expected: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock; a product without a kernel here is left out."""
    monkeypatch.undo()
    now = [0.0]

    class Passing(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: Tensor) -> Tensor:
            if self.seconds < 0:
                raise RuntimeError
            now[0] += self.seconds
            return x

    monkeypatch.setattr(products.time, "perf_counter", lambda: now[0])
    layers = {name: Passing(seconds) for name, seconds in ({"": 0.015} | times).items()}
    found = products._fastest(torch.zeros(1, 1), torch.zeros(3, 1, 1), layers, 10.0)
    assert found == (expected[0], pytest.approx(expected[1]))
    assert products._fastest(torch.zeros(1, 1), torch.zeros(3, 1, 1), layers, 0.0) == ("", 1.0)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "deberta-v2", "t5"])
def test_models_are_restored(kind: str, product: str) -> None:
    model = transformers.AutoModel.from_config(tiny_config(kind)).eval()
    inputs = inputs_of(model)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
        report = accelerate(model)
        assert "linear layers: oneDNN" in str(report)
        assert ("or posenc" in str(report)) == (product == "posenc" and kind != "gpt2")
        got = model(**inputs)[0]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        copied, read = deepcopy(model), pickle.loads(pickle.dumps(model))
        assert torch.equal(copied(**inputs)[0], got)
        assert accelerate(model).note == ALREADY
        for name, x in model.state_dict().items():
            assert torch.equal(x, state[name])
        for each in (model, copied, read):
            restore(each)
            assert torch.equal(each(**inputs)[0], expected)
            assert not products.products_of(each)
    for path, module in model.named_modules():
        assert vars(module).keys() == before[path].keys()
    assert not restore(model)


def test_copies_compute_with_their_own_weights() -> None:
    layer = linear().requires_grad_(False)
    products.take_products(layer)
    copied = deepcopy(layer)
    copied.weight.zero_()
    copied.bias.zero_()
    x = torch.randn(3, WIDTH)
    assert not copied(x).any()
    assert layer(x).any()


def test_pickles_need_no_posenc() -> None:
    layer = linear()
    products.take_products(layer)
    assert b"posenc" not in pickle.dumps(layer)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_that_are_left_alone() -> None:
    hooked, flat, none, empty = linear(), linear(), linear(), linear()
    empty.weight = nn.Parameter(torch.empty(OUTPUTS, 0))
    hooked.forward = lambda x: x  # type: ignore[method-assign]
    flat.weight = nn.Parameter(torch.randn(WIDTH * OUTPUTS))  # as of a sharded model
    none.register_parameter("weight", None)
    elsewhere = nn.Linear(WIDTH, OUTPUTS, device="meta")
    others = (Doubled(WIDTH, OUTPUTS), linear().double(), hooked, flat, none, empty, elsewhere)
    for layer in others:
        before = type(layer), dict(vars(layer))
        assert products.take_products(layer) == ""
        assert (type(layer), vars(layer)) == before


@pytest.mark.parametrize(
    "bias", [torch.tensor(5.0), torch.ones(1), torch.ones(1, OUTPUTS), torch.ones(3, OUTPUTS)]
)
def test_biases_that_pytorch_broadcasts(bias: Tensor) -> None:
    layer, x = linear(), torch.randn(3, WIDTH)
    products.take_products(layer)
    layer.bias = nn.Parameter(bias)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ layer.weight.T + bias)


def test_inputs_that_are_not_strided() -> None:
    layer = linear().requires_grad_(False)
    products.take_products(layer)
    rows = [torch.randn(2, WIDTH), torch.randn(3, WIDTH)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        nested = torch.nested.nested_tensor(rows)
        for got, x in zip(layer(nested).unbind(), rows, strict=True):
            torch.testing.assert_close(got, layer(x))
    with pytest.raises(RuntimeError, match=f"{WIDTH}"):
        layer(torch.randn(3, WIDTH + 1))
    with pytest.raises(TypeError):
        layer(rows[0], rows[1])
    with pytest.raises(TypeError):
        layer(rows[0].tolist())


def test_parametrized_weights_are_read_once() -> None:
    plain, taken = linear(), linear()
    products.take_products(taken)
    for layer in (plain, taken):
        torch.manual_seed(1)
        nn.utils.parametrizations.spectral_norm(layer)
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        assert torch.equal(taken(x), plain(x))


def test_replicas_compute_with_their_own_weights() -> None:
    layer = linear().requires_grad_(False)
    products.take_products(layer)
    replica: Any = layer._replicate_for_data_parallel()  # type: ignore[operator]
    replica.weight, replica.bias = torch.zeros(OUTPUTS, WIDTH), torch.zeros(OUTPUTS)
    assert not replica(torch.randn(3, WIDTH)).any()


def test_layers_are_freed_without_the_collector() -> None:
    layer = linear()
    products.take_products(layer)
    layer(torch.randn(3, WIDTH))
    seen = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert seen() is None
    finally:
        gc.enable()


def test_no_onednn_where_the_user_disables_it(computed: list[tuple[str, tuple[int, ...]]]) -> None:
    layer = of_gpt2().requires_grad_(False)
    products.take_products(layer)
    computed.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other devices
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            layer(torch.randn(3, WIDTH))
    assert not computed
    layer(torch.randn(3, WIDTH))
    assert computed


def test_layers_that_change_afterwards(computed: list[tuple[str, tuple[int, ...]]]) -> None:
    layer = linear().requires_grad_(False)
    products.take_products(layer)
    x = torch.randn(3, WIDTH)
    computed.clear()
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.to("meta")(x.to("meta")).is_meta
    assert not computed


def test_hooks_of_accelerate_around_the_method() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    layer = linear().requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = layer(x)
    products.take_products(layer)
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu"))
    torch.testing.assert_close(layer(x), expected)
    assert products.put_products_back(layer)
    assert torch.equal(layer(x), expected)
    hooks.remove_hook_from_module(layer)
    assert torch.equal(layer(x), expected)


def test_reading_of_the_argument() -> None:
    model: Any = transformers.AutoModel.from_config(tiny_config("bert")).eval()
    assert accelerate(model, linear="original").linear == ""
    assert not products.products_of(model)
    with pytest.raises(UnknownNameError):
        accelerate(model, linear="fast")  # type: ignore[arg-type]
