"""Results of weights and settings, reused for as long as these stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, ItemsView, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Protocol, TypeGuard, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from posenc.runtime import has_values, is_transformed, needs_dispatch

T = TypeVar("T")

PLAIN = ("torch.nn.modules.", "posenc.")
"""Modules of Python whose layers compute with their own parameters alone. Those of PEFT and of
quantizers have switches that leave no trace in parameters."""

MOST = 2
"""Results kept of one weight."""

SAMPLED = 64
"""Numbers of a tensor that are compared, at most."""


class Layer(Protocol):
    """A module, or a function of the modules that it names."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules that it reads."""


def reused(
    layers: Sequence[Layer], tensors: Sequence[Tensor], compute: Callable[[], T], *kind: Hashable
) -> T | None:
    """The result of ``compute``, kept from the second call on while nothing that it reads changes.

    A weight counts as changed when it is another tensor, was written to, or differs in one of
    ``SAMPLED`` numbers: edits through ``.data`` leave no other trace. A layer does when it is
    another module, or its settings or the modules in it are others. None at the first call with
    layers as they are now; on devices other than CPUs; where a gradient is wanted; while PyTorch
    traces, watches or transforms what is computed; and with layers that drop, or that others
    observe or replace. A result lives no longer than the first of the weights.

    Args:
        layers: that ``compute`` calls.
        tensors: that it reads beside the parameters of the layers.
        kind: what else the result depends on.
    """
    modules = [module for layer in layers for module in layer.modules()]
    own = [x for module in modules for x in module.parameters(recurse=False)]
    weights = [*own, *tensors]  # a layer's own first: layers may share tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in weights):
        return None
    if not (all(map(is_plain, modules)) and all(map(_is_readable, weights))):
        return None
    if is_transformed() or needs_dispatch(*weights):
        return None
    results: dict[Hashable, _Result] = _RESULTS.setdefault(weights[0], {})  # type: ignore[no-untyped-call]
    result = results.pop((kind, _autocast()), None)
    if result is None or not result.holds(modules, weights):
        result = _Result(modules, weights)
        while len(results) >= MOST:
            del results[next(iter(results))]
    elif result.value is None:
        with torch.inference_mode(False), torch.no_grad():
            result.value = compute()
    results[kind, _autocast()] = result  # the last used is the last to go
    return cast(T | None, result.value)


def constant(values: Sequence[float], *, like: Tensor) -> Tensor:
    """Numbers as a tensor of the dtype and device of another, made once.

    Anew while PyTorch traces, captures, watches or transforms what is computed. On a CUDA device a
    new one waits for all that the device has yet to do.
    """
    if is_transformed() or needs_dispatch(like) or not has_values(like):
        return like.new_tensor(values)
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return like.new_tensor(values)
    return _constant(tuple(values), like.dtype, like.device)


@lru_cache(256)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


class TensorStates:
    """Tensors as they were: which, how often written to, and some of their numbers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [ref(x) for x in tensors]
        self.states = [_state(x) for x in tensors]
        self.views = [_sample(x) for x in tensors]
        self.samples = [view.clone() for view in self.views]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """True if these are the same tensors, unchanged."""
        if len(tensors) != len(self.tensors):
            return False
        for x, was, state in zip(tensors, self.tensors, self.states, strict=True):
            if was() is not x or _state(x) != state:
                return False
        return all(map(torch.equal, self.samples, self.views))


class _Result:
    """A result, None as yet, with layers and weights as they were when it was asked for."""

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[Tensor]) -> None:
        self.value: object = None
        self.weights = TensorStates(weights)
        self.modules = [
            (ref(module), _parts(module), _plain_settings(module)) for module in modules
        ]

    def holds(self, modules: Sequence[nn.Module], weights: Sequence[Tensor]) -> bool:
        if len(modules) != len(self.modules):
            return False
        for module, (was, parts, settings) in zip(modules, self.modules, strict=True):
            if was() is not module or _parts(module) != parts:
                return False
            if not settings <= vars(module).items():
                return False
        return self.weights.hold(weights)


class ModuleStates:
    """A module and those in it as they were: parameters, buffers and settings.

    Attributes:
        complete: results of the module depend on nothing that these states do not hold.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        tensors, settings = _tensors(modules), [_settings(module) for module in modules]
        self.complete = all(map(is_plain, modules)) and all(map(_is_readable, tensors))
        self.complete &= all(_is_setting(x) for own in settings for x in own.values())
        self.root, self.inner = ref(root), modules[1:] if self.complete else []
        known = list(zip(map(_parts, modules), map(dict.items, settings), strict=True))
        self.modules = known if self.complete else []
        self.tensors = TensorStates(tensors if self.complete else [])

    def hold(self) -> bool:
        """True if all are unchanged, and nothing observes them; or if they are not complete."""
        root = self.root()
        if root is None or not self.complete:
            return True
        if _observes_all():
            return False
        modules = [root, *self.inner]
        for module, (parts, settings) in zip(modules, self.modules, strict=True):
            if _parts(module) != parts or not settings <= vars(module).items() or _hooks(module):
                return False
        return self.tensors.hold(_tensors(modules))


SETTINGS = (bool, int, float, str, type(None), torch.dtype)

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def _settings(module: nn.Module) -> dict[str, object]:
    """Attributes beside those that any module has, and the arguments that it was made from."""
    return {n: x for n, x in vars(module).items() if n not in OF_MODULES and n != "given"}


def _plain_settings(module: nn.Module) -> ItemsView[str, object]:
    """Those that can be compared."""
    return {name: x for name, x in _settings(module).items() if _is_setting(x)}.items()


def _is_setting(x: object) -> bool:
    """True of plain values, and of frozen dataclasses and tuples of them."""
    if isinstance(x, tuple):
        return all(map(_is_setting, x))
    if isinstance(x, SETTINGS):
        return True
    parameters = getattr(type(x), "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen and parameters.eq
    return frozen and all(_is_setting(getattr(x, field.name)) for field in fields(x))  # type: ignore[arg-type]


def _parts(module: nn.Module) -> tuple[Hashable, ...]:
    """The class of a module, how many attributes it has, and the modules in it."""
    return type(module), len(vars(module)), *map(id, module._modules.values())


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    found: list[Tensor] = []
    for module in modules:
        for table in (module._parameters, module._buffers):
            found += [x for x in table.values() if x is not None]
    return found


_RESULTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the first of the weights, then by kind."""


def _hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _observes_all() -> bool:
    """True while hooks observe each call of any module."""
    every = nn.modules.module
    return bool(every._global_forward_hooks or every._global_forward_pre_hooks)


def is_plain(module: nn.Module) -> bool:
    """True of a layer of PyTorch or posenc that computes by its parameters, unobserved."""
    observed = _hooks(module) or "forward" in vars(module) or _observes_all()
    drops = module.training and isinstance(module, nn.modules.dropout._DropoutNd)
    return type(module).__module__.startswith(PLAIN) and not (observed or drops)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """The same of one that does nothing but multiply by its weight and add its bias.

    Its gradients may be read through it, too.
    """
    every = nn.modules.module
    backward = module._backward_hooks or module._backward_pre_hooks
    backward = backward or every._global_backward_hooks or every._global_backward_pre_hooks
    linear = isinstance(module, nn.Linear) and module.bias is not None
    return linear and is_plain(module) and not backward


def _is_readable(x: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return plain and has_values(x) and not x.is_inference()


def _state(x: Tensor) -> tuple[Hashable, ...]:
    return x.data_ptr(), x._version, x.dtype, x.shape


def _sample(x: Tensor) -> Tensor:
    """Numbers of a contiguous tensor, evenly spread, in its memory; no view that autograd knows."""
    step = -(-x.numel() // SAMPLED)
    size = -(-x.numel() // step)
    storage = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), (size,), (step,))


def numbers_of(x: Tensor) -> tuple[Hashable, ...]:
    """The place of a tensor in memory, and some of its numbers if they can be read at no cost."""
    sample = _sample(x).tolist() if _is_readable(x) else ()
    return x.data_ptr(), *sample


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
