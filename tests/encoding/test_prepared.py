"""Results of weights are reused while the weights are the same, and in no other case."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import posenc
from posenc import Grid, Layout
from posenc.encoding import prepared as prepared_file
from posenc.encoding.prepared import (
    MOST,
    Copies,
    Prepared,
    States,
    are_known,
    constant,
    is_plain_linear,
    reused,
    reused_later,
    tensors_of,
)
from posenc.encodings.common import rotation

pytestmark = pytest.mark.usefixtures("entered")


class Doubled(nn.Module):
    """A layer of no library that is known to compute with its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


Register = Callable[[Callable[..., None]], RemovableHandle]


def times(layer: nn.Module, calls: int, *kind: int) -> int:
    """How often a result is computed in so many calls."""
    count = 0

    def compute() -> object:
        nonlocal count
        count += 1
        return torch.zeros(1)

    with torch.no_grad():
        for _ in range(calls):
            reused_later(compute, "result", *kind, layers=(layer,))
    return count


def test_results_are_kept_from_the_second_call_on() -> None:
    layer = nn.Linear(200, 3).eval()
    assert times(layer, 1) == 0
    assert times(layer, 5) == 1
    assert times(layer, 5) == 0
    assert times(layer, 5, 7) == 1  # another kind


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.add_(1.0),
        lambda layer: layer.weight[1, 1].add_(1.0),  # none of the sampled numbers
        lambda layer: layer.weight.data.add_(1.0),
        lambda layer: layer.bias.data.zero_(),
        lambda layer: setattr(layer, "bias", nn.Parameter(1.0 - layer.bias.detach())),
        lambda layer: layer.double(),
        lambda layer: layer.load_state_dict({n: -x for n, x in layer.state_dict().items()}),
    ],
    ids=["in place", "one number", "data", "bias", "replaced", "dtype", "loaded"],
)
def test_changed_weights_are_noticed(change: Callable[[nn.Linear], object]) -> None:
    layer = nn.Linear(200, 3).eval()
    times(layer, 2)
    with torch.no_grad():
        change(layer)
    assert times(layer, 3) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer[1], "eps", 0.1),
        lambda layer: layer.append(nn.Tanh()),
        lambda layer: layer.__setitem__(2, nn.Tanh()),
    ],
    ids=["setting", "one more", "another"],
)
def test_changed_layers_are_noticed(change: Callable[[nn.Sequential], object]) -> None:
    """Layers compute with more than weights."""
    layer = nn.Sequential(nn.Linear(20, 3), nn.LayerNorm(3), nn.ReLU()).eval()
    times(layer, 2)
    change(layer)
    assert times(layer, 3) == 1


def test_dtypes_and_shapes_are_compared_beside_bits() -> None:
    zeros = torch.zeros(2, 6)
    copies = Copies([zeros])
    assert copies.hold([zeros.clone()])
    assert not copies.hold([zeros.double()])
    assert not copies.hold([zeros.int()])
    assert not copies.hold([zeros.view(3, 4)])


def states(module: nn.Module) -> States:
    modules = list(module.modules())
    return States(modules, tensors_of(modules))


@dataclass(frozen=True)
class Frozen:
    """A setting that cannot be changed, but for what is in it."""

    values: object


@pytest.mark.parametrize(
    "setting", [([1.0],), (nn.Identity(),), Frozen([1.0]), (Frozen(torch.ones(1)),)]
)
def test_layers_with_settings_in_which_something_can_change_are_computed(setting: object) -> None:
    layer = nn.Linear(4, 3).eval()
    layer.setting = setting  # type: ignore[assignment]
    assert times(layer, 3) == 0
    layer.setting = (1.0, Frozen((2, "half")))  # type: ignore[assignment]
    assert times(layer, 3) == 1


def test_states_end_where_layers_begin_to_drop() -> None:
    """Whether they are known is asked once."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()
    recorded = states(module)
    with torch.no_grad():
        assert recorded.hold(())
        assert not are_known(list(module.train().modules()))
        assert not recorded.hold(())


def test_tensors_are_told_apart_by_their_names() -> None:
    module = nn.Linear(4, 3)
    module.register_buffer("first", torch.ones(2))
    module.register_buffer("second", None)
    recorded = states(module)
    with torch.no_grad():
        assert recorded.hold(())
        module.first, module.second = None, module.first
        assert not recorded.hold(())


def observed_layer() -> nn.Module:
    layer = nn.Linear(4, 3).eval()
    layer.register_forward_hook(lambda module, given, result: 2 * result)
    return layer


def replaced_forward() -> nn.Module:
    layer = nn.Linear(4, 3).eval()
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        observed_layer(),
        replaced_forward(),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout()),
        Doubled().eval(),
        nn.Linear(4, 3, device="meta").eval(),
    ],
    ids=["hook", "forward", "dropout", "unknown", "meta"],
)
def test_layers_that_may_change_otherwise_are_computed(layer: nn.Module) -> None:
    assert times(layer, 3) == 0


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ],
)
def test_layers_are_computed_while_all_modules_are_observed(register: Register) -> None:
    layer = nn.Linear(4, 3).eval()
    times(layer, 2)
    handle = register(lambda *_: None)
    try:
        assert times(layer, 3) == 0
    finally:
        handle.remove()
    assert times(layer, 3) == 1


class Watching(TorchDispatchMode):
    """Sees all operations, and lets them through."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return operation(*arguments, **(options or {}))


def test_layers_are_computed_while_operations_are_watched() -> None:
    layer = nn.Linear(4, 3).eval()
    times(layer, 2)
    with torch.no_grad():
        assert reused_later(lambda: 1, "result", layers=(layer,)) is not None
        with Watching():
            assert reused_later(lambda: 1, "result", layers=(layer,)) is None


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
def test_gradients_of_linear_layers_are_observed(register: Register) -> None:
    layer = nn.Linear(4, 3)
    assert is_plain_linear(layer)
    handle = register(lambda *_: None)
    try:
        assert not is_plain_linear(layer)
    finally:
        handle.remove()
    layer.register_full_backward_hook(lambda *_: None)
    assert not is_plain_linear(layer)


def test_nothing_is_kept_where_gradients_are_wanted() -> None:
    layer = nn.Linear(4, 3).eval()
    assert all(reused_later(lambda: 1, "result", layers=(layer,)) is None for _ in range(3))
    layer.requires_grad_(False)
    again = [reused_later(lambda: 1, "result", layers=(layer,)) for _ in range(3)]
    assert again == [1, 1, 1]  # the first calls were met


def test_results_of_autocast_are_kept_apart() -> None:
    layer, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    with torch.no_grad():
        for dtype in dtypes:
            for _ in range(2):
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    found = reused(lambda: layer(x), "result", layers=(layer,))
            assert found is not None
            assert found.dtype == dtype


def test_results_of_inference_can_be_saved_for_gradients() -> None:
    layer = nn.Linear(4, 3).eval().requires_grad_(False)
    with torch.inference_mode():
        for _ in range(2):
            result = reused(lambda: layer.weight * 2, "result", layers=(layer,))
    assert result is not None
    assert not result.is_inference()


def test_results_end_with_their_layers_once_others_are_stored() -> None:
    layer, other = nn.Linear(4, 3).eval(), nn.Linear(4, 3).eval()
    with torch.no_grad():
        for _ in range(2):
            dead = weakref.ref(reused(lambda: torch.zeros(1), "result", layers=(layer,)))
        assert dead() is not None
        del layer
        gc.collect()
        reused(lambda: torch.zeros(1), "result", layers=(other,))
    assert dead() is None


def test_results_end_with_what_owns_them(entered: Prepared) -> None:
    entered.__exit__()
    layer, prepared = nn.Linear(4, 3).eval(), Prepared()
    with torch.no_grad(), prepared:
        for _ in range(2):
            dead = weakref.ref(reused(lambda: torch.zeros(1), "result", layers=(layer,)))
        assert dead() is not None
        for copied in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
            assert not copied._slots
    del prepared
    gc.collect()
    assert dead() is None


def test_the_first_that_was_entered_is_used(entered: Prepared) -> None:
    """So that layers share what their model has."""
    entered.__exit__()
    layer, outer, inner = nn.Linear(4, 3).eval(), Prepared(), Prepared()

    def result() -> object:
        return reused(object, "result", layers=(layer,))

    with torch.no_grad():
        with outer:
            _, first = result(), result()
            with inner:
                assert result() is first
            assert result() is first
        with inner:
            assert result() is not first


def test_graphs_take_what_was_computed_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the very tensors, and for good: replays read it, however many others are stored."""
    numbers, layer = torch.arange(3), nn.Linear(4, 3).eval()

    def result(kind: int = 0, numbers: torch.Tensor = numbers) -> torch.Tensor:
        return reused(lambda: torch.zeros(1), "mask", kind, tensors=(numbers,))

    assert reused_later(lambda: torch.zeros(1), "table", tensors=(numbers,)) is None
    _, before = result(), result()
    monkeypatch.setattr(prepared_file, "_is_capturing", lambda: True)
    assert result() is before
    assert result(numbers=numbers.clone()) is not before
    assert result(1) is not result(1)
    assert reused_later(lambda: torch.zeros(1), "table", tensors=(numbers,)) is None
    with torch.no_grad():
        found = [reused(lambda: torch.zeros(1), "rows", layers=(layer,)) for _ in range(3)]
    assert found[0] is not found[1]
    monkeypatch.setattr(prepared_file, "_is_capturing", lambda: False)
    for kind in range(2, 20):
        result(kind), result(kind)
    assert result() is before


def test_nothing_is_stored_outside() -> None:
    layer = nn.Linear(4, 3).eval()
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:  # whose threads have entered nothing
        first, second = (
            pool.submit(reused, object, "result", layers=(layer,)).result() for _ in range(2)
        )
        assert first is not second
        later = [pool.submit(reused_later, object, "x", layers=(layer,)) for _ in range(3)]
        assert [x.result() for x in later] == [None] * 3


def test_layers_that_share_a_tensor_keep_results_of_their_own() -> None:
    shared = torch.randn(7, 4)
    layers = [nn.Linear(4, 3).eval() for _ in range(5)]
    with torch.no_grad():
        for _ in range(3):
            found = [reused(object, "x", layers=(layer,), tensors=(shared,)) for layer in layers]
        again = [reused(object, "x", layers=(layer,), tensors=(shared,)) for layer in layers]
    assert None not in found
    assert len(set(found)) == len(layers)
    assert again == found


def test_what_was_computed_without_a_tensor_is_not_that_with_one() -> None:
    """A layer with all keys before one with chunks of them, as in Llama 4."""
    grid = Grid.of(Layout.sequence(6), causal=True)
    for seen in (grid, grid.chunked(2), grid, grid.chunked(3)):
        visible = prepared_file.reused_of_grid(lambda x: x.visible, "visible", grid=seen)
        assert torch.equal(visible, seen.visible)


def test_few_kinds_are_kept() -> None:
    layer, kept = nn.Linear(4, 3).eval(), []
    with torch.no_grad():
        for kind in range(20):
            for _ in range(2):
                result = reused(lambda: torch.zeros(1), "result", kind, layers=(layer,))
            kept.append(weakref.ref(result))
    del result
    gc.collect()
    assert sum(x() is not None for x in kept) == MOST


ROTATING = ("rope_mixed", "comrope", "lierope", "grape_multiplicative", "pope")


@pytest.mark.parametrize("name", ROTATING)
def test_kept_rotations_are_those_of_each_layout(name: str) -> None:
    """Layouts that share positions may differ in their special tokens."""
    torch.manual_seed(0)
    sides = (4, 5)
    encoding = posenc.create(name, dim=32, heads=2, head_dim=16).eval()
    q, k = torch.randn(2, 3, 2, 20, 16)
    image = Layout.image(*sides)
    first = image if encoding.query_key.axes == (2,) else Layout.sequence(20)  # type: ignore[union-attr]
    special = torch.arange(20).unsqueeze(0) < 4
    marked = Layout(first.positions, first.order, special=special)
    farther = Layout(3 * first.positions, first.order)
    with torch.no_grad():
        for layout in (first, marked, farther, first):
            expected = copy.deepcopy(encoding).query_key(q, k, Grid.of(layout))  # type: ignore[misc]
            for _ in range(3):
                found = encoding.query_key(q, k, Grid.of(layout))  # type: ignore[misc]
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("most", [0, 10_000])
def test_few_numbers_of_rotations_are_kept(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "KEPT", most)
    encoding = posenc.create("rope_mixed", heads=2, head_dim=16).eval()
    q, grid = torch.randn(1, 2, 20, 16), Grid.of(Layout.image(4, 5))
    with torch.no_grad():
        found = [encoding.query_key.lower(q, q, grid) for _ in range(3)]  # type: ignore[union-attr]
    assert (found[1].query[0] is found[2].query[0]) == (most > 0)  # type: ignore[union-attr]


def test_constants_are_of_the_dtype_that_is_given() -> None:
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    assert constant([0.5, 2.0], like=single).tolist() == [0.5, 2.0]
    assert constant([0.5, 2.0], like=double).dtype == torch.float64
    assert constant((0.5, 3.0), like=single).tolist() == [0.5, 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_constants_of_a_device_are_made_once() -> None:
    like = torch.zeros(1, device="cuda")
    first = constant([0.5, 2.0], like=like)
    assert constant((0.5, 2.0), like=like) is first
    with torch.inference_mode():
        made = constant([7.0], like=like)
    learned = torch.ones(1, device="cuda", requires_grad=True)
    (learned * made).sum().backward()
    assert learned.grad is not None
    assert learned.grad.item() == 7.0


def test_constants_of_traces_stay_in_them() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * constant([11.0, 13.0], like=x)

    with FakeTensorMode():
        scaled(torch.zeros(2))
    graph = make_fx(scaled)(torch.zeros(2))
    assert scaled(torch.ones(2)).tolist() == [11.0, 13.0]
    assert graph(torch.ones(2)).tolist() == [11.0, 13.0]
    rows = torch.func.vmap(scaled)(torch.ones(3, 2))
    assert rows.tolist() == [[11.0, 13.0]] * 3
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [11.0, 13.0]
