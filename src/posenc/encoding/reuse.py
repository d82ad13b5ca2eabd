"""Reuse of results that depend on weights and settings, while these are unchanged."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
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
"""Largest number of results stored per weight."""

_compare = (ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HasModules(Protocol):
    """An object that names the modules it reads: a module, or a function of modules."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules that it reads."""


def reused(
    layers: Sequence[HasModules],
    tensors: Sequence[Tensor],
    compute: Callable[[], T],
    *kind: Hashable,
) -> T | None:
    """The result of ``compute``, stored from the second call on while its inputs are unchanged.

    Weights and buffers are compared to the last bit, at each call: edits through ``.data`` or an
    array that shares memory leave no other trace. A layer changes when it is another module, or its
    settings or the modules in it are others. None at the first call with layers as they are now; on
    devices other than CPUs; where a gradient is wanted; while PyTorch traces, watches or transforms
    what is computed; and with layers that drop, that have settings which cannot be compared, or
    that others observe or replace. A result lives no longer than the first of the weights.

    Args:
        layers: that ``compute`` calls.
        tensors: that it reads beside those of the layers.
        kind: what else the result depends on.
    """
    modules = [module for layer in layers for module in layer.modules()]
    weights = [*_tensors(modules), *tensors]  # a layer's own first: layers may share tensors
    if not weights or wants_gradients(weights):
        return None
    if not (are_known(modules) and all(map(_is_readable, weights))):
        return None
    if is_transformed() or needs_dispatch(*weights):
        return None
    results: dict[Hashable, _Result] = _RESULTS.setdefault(weights[0], {})  # type: ignore[no-untyped-call]
    result = results.pop((kind, _autocast()), None)
    if result is None or not result.states.hold(modules, weights):
        result = _Result(States(modules, weights))
        while len(results) >= MOST:
            del results[next(iter(results))]
    elif result.value is None:
        with torch.inference_mode(False), torch.no_grad():
            result.value = compute()
    results[kind, _autocast()] = result  # the last used is the last to go
    return cast(T | None, result.value)


def wants_gradients(tensors: Sequence[Tensor]) -> bool:
    """True if autograd is to record what is computed with one of them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


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


class Copies:
    """Copies of tensors, compared bit by bit.

    Args:
        tensors: that are copied; None stays None.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.copies = [
            None if x is None else x.detach().clone(memory_format=torch.contiguous_format)
            for x in tensors
        ]

    def hold(self, tensors: Sequence[Tensor | None]) -> bool:
        """True if these tensors have the bits of those, and their shapes, dtypes and devices.

        Waits for devices other than the CPU. False under ``torch.func``, whose tensors have none.
        """
        if is_transformed():
            return False
        return len(tensors) == len(self.copies) and all(map(_same_bits, tensors, self.copies))


def _same_bits(x: Tensor | None, copy: Tensor | None) -> bool:
    if x is None or copy is None:
        return x is copy
    if (x.dtype, x.shape, x.device) != (copy.dtype, copy.shape, copy.device):
        return False
    x = x.detach().contiguous()
    if x.is_cpu:
        return not _compare(x.data_ptr(), copy.data_ptr(), copy.nbytes)
    return torch.equal(*(side.flatten().view(torch.uint8) for side in (x, copy)))


class States:
    """Recorded states of modules and tensors: classes, settings, submodules, and all bits.

    Args:
        modules: whose settings can be compared, see ``are_known``.
        tensors: theirs and others.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> None:
        self.modules = [(ref(x), _parts(x), _settings(x).items()) for x in modules]
        self.copies = Copies(tensors)

    def hold(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> bool:
        """True if these are the same modules, unchanged, and the tensors have the same bits."""
        if len(modules) != len(self.modules):
            return False
        for module, (was, parts, settings) in zip(modules, self.modules, strict=True):
            if was() is not module or _parts(module) != parts:
                return False
            if not settings <= vars(module).items():
                return False
        return self.copies.hold(tensors)


@dataclass(eq=False)
class _Result:
    """A stored result, None before the second call, with the states that it is valid for."""

    states: States
    value: object = None


class ModuleStates:
    """Recorded states of a module and its submodules: parameters, buffers and settings.

    Attributes:
        complete: results of the module depend on nothing that these states do not hold.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        tensors = _tensors(modules)
        self.root = ref(root)
        self.complete = are_known(modules) and all(map(_is_readable, tensors))
        self._inner = modules[1:] if self.complete else []  # a root that held itself would live on
        self._states = States(modules, tensors) if self.complete else None

    def hold(self) -> bool:
        """True if they are complete and all of them unchanged, and nothing observes the modules."""
        root = self.root()
        if root is None or self._states is None or _observes_all():
            return False
        modules = [root, *self._inner]
        return not any(map(_hooks, modules)) and self._states.hold(modules, _tensors(modules))


SETTINGS = (bool, int, float, str, type(None), torch.dtype)

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def _settings(module: nn.Module) -> dict[str, object]:
    """Attributes of the module that ``nn.Module`` does not have, without constructor arguments."""
    return {n: x for n, x in vars(module).items() if n not in OF_MODULES and n != "given"}


def are_known(modules: Sequence[nn.Module]) -> bool:
    """True if all compute by their parameters, buffers and settings, and these can be compared."""
    return all(map(is_plain, modules)) and all(
        _is_setting(x) for module in modules for x in _settings(module).values()
    )


def _is_setting(x: object) -> bool:
    """True for plain values, and for frozen dataclasses and tuples of plain values."""
    if isinstance(x, tuple):
        return all(map(_is_setting, x))
    if isinstance(x, SETTINGS):
        return True
    parameters = getattr(type(x), "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen and parameters.eq
    return frozen and all(_is_setting(getattr(x, field.name)) for field in fields(x))  # type: ignore[arg-type]


def _parts(module: nn.Module) -> tuple[Hashable, ...]:
    """The class of a module, how many attributes it has, its modules, and which tensors it has."""
    tables = (module._parameters, module._buffers)
    tensors = (name for table in tables for name, x in table.items() if x is not None)
    return type(module), len(vars(module)), *map(id, module._modules.values()), *tensors


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for module in modules:
        for table in (module._parameters, module._buffers):
            tensors += [x for x in table.values() if x is not None]
    return tensors


_RESULTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Stored results, by the first of the weights, then by kind."""


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
    """True of an unobserved ``nn.Linear`` with a bias, whose backward has no hooks either."""
    every = nn.modules.module
    backward = module._backward_hooks or module._backward_pre_hooks
    backward = backward or every._global_backward_hooks or every._global_backward_pre_hooks
    linear = isinstance(module, nn.Linear) and module.bias is not None
    return linear and is_plain(module) and not backward


def _is_readable(x: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return plain and has_values(x)


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
