"""Results of calls that later calls reuse, while all that they were made from is unchanged."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol, Self, TypeGuard, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_scripted, is_transformed, needs_dispatch

T = TypeVar("T")

MOST = 8
"""Largest number of results stored of one name and one sequence of modules."""

PLAIN = ("torch.nn.modules.", "posenc.")
"""Modules of Python whose layers compute with their own parameters alone. Those of PEFT and of
quantizers have switches that leave no trace in parameters."""

_compare = (ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HasModules(Protocol):
    """An object that names the modules it reads: a module, or a function of modules."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules that it reads."""


@dataclass(eq=False)
class _Result:
    """A stored result, and the states that it is valid for.

    Args:
        owners: the modules by which it is found.
        states: None where there are none to compare, and after the first call of its kind.
        computed: False before the result is there.
        pinned: True if a CUDA graph may read its tensors.
    """

    owners: list[ref[nn.Module]]
    states: States | None = None
    value: object = None
    computed: bool = False
    pinned: bool = False

    def alive(self) -> bool:
        """True if none of its owners is gone."""
        return not self.owners or all(owner() is not None for owner in self.owners)

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        """True if it is computed, and its layers and tensors are as they were."""
        if self.states is None or not self.computed:
            return self.computed
        weights = self.states.weights()
        if weights is None or not _are_comparable(compared := [*weights, *tensors]):
            return False
        return self.states.copies.hold(compared)


class Prepared:
    """Results that calls share: repeated calls, tables, rotations, masks, facts of layouts.

    Inside ``with prepared:`` each call of posenc stores what later ones can reuse, and reuses what
    is there while weights, settings and layouts have the same bits as when it was computed.
    Encodings, layers and models have one each, which ``attend`` and they enter; of several that are
    entered, the first one is used, so that layers of a model share theirs. Threads may share one.
    Copies and pickles are empty. Of one kind and modules the last 8 results are stored.

    Example:
        >>> import posenc, torch
        >>> encoding, prepared = posenc.create("alibi", heads=4), posenc.Prepared()
        >>> grid = posenc.Grid.of(posenc.Layout.sequence(16), causal=True)
        >>> q, k, v = torch.randn(3, 1, 4, 16, 8).unbind()
        >>> with torch.no_grad(), prepared:
        ...     outputs = [posenc.attend(q, k, v, grid, encoding) for _ in range(3)]
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, dict[Hashable, _Result]] = {}

    def __enter__(self) -> Self:
        if not torch.compiler.is_compiling():
            _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        if not torch.compiler.is_compiling():
            entered = _ENTERED.get()
            for at in reversed(range(len(entered))):
                if entered[at] is self:
                    _ENTERED.set((*entered[:at], *entered[at + 1 :]))
                    break

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def get(self, slot: Hashable, kind: Hashable) -> _Result | None:
        """The result of a kind that is stored in a slot, or None."""
        results = self._slots.get(slot)
        return None if results is None else results.get(kind)

    def put(self, slot: Hashable, kind: Hashable, result: _Result) -> None:
        """Store a result as the last used of its slot, in which the first used makes room."""
        results = self._slots.get(slot)
        if results is None:
            for other, stored in list(self._slots.items()):
                if not all(old.alive() for old in list(stored.values())):
                    self._slots.pop(other, None)
            results = self._slots[slot] = {}
        results.pop(kind, None)
        unread = [old for old, x in list(results.items()) if not x.pinned]
        for old in unread[: max(0, len(results) + 1 - MOST)]:
            results.pop(old, None)
        results[kind] = result


_ENTERED: ContextVar[tuple[Prepared, ...]] = ContextVar("_ENTERED", default=())


def entering(prepared: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """The context itself, or nothing in code that is traced, which may leave the graph in it."""
    return nullcontext() if torch.compiler.is_compiling() else prepared


def active() -> Prepared | None:
    """The first ``Prepared`` that was entered and not left; None in code that is traced."""
    if torch.compiler.is_compiling():
        return None
    entered = _ENTERED.get()
    return entered[0] if entered else None


def reused(
    compute: Callable[[], T],
    name: Hashable,
    *kind: Hashable,
    layers: Sequence[HasModules] = (),
    tensors: Sequence[Tensor | None] = (),
) -> T:
    """``compute()``, or its stored result while layers and tensors are unchanged.

    Stored from the second call on, so that a single one costs no copies of what it read; from the
    first where there is nothing to compare. Layers and tensors are compared to the last bit at each
    call: edits through ``.data`` or an array that shares memory leave no other trace. A layer
    changes when it is another module, or its settings or the modules in it are others. Computed
    without an active ``Prepared``; where a gradient is wanted; while PyTorch watches or transforms
    what is computed; and with layers that drop, that are not on a CPU, that have settings which
    cannot be compared, or that others observe or replace.

    Its tensors can be saved for gradients, also those of inference mode. While a CUDA graph is
    captured, whose replays compare nothing, a result is taken where the tensors are the same.

    Args:
        compute: calls ``layers`` and reads ``tensors``.
        name: of what is computed; results of each name and layers are counted for themselves.
        kind: further values that the result depends on.
    """
    result = _result(name, kind, layers, tensors)
    return compute() if result is None else _computed(result, compute)


def reused_later(
    compute: Callable[[], T],
    name: Hashable,
    *kind: Hashable,
    layers: Sequence[HasModules] = (),
    tensors: Sequence[Tensor | None] = (),
) -> T | None:
    """The result of ``compute`` as by ``reused``, from the second call on; None before.

    For results of which one call needs a part only. None also where nothing can be stored.
    """
    result = _result(name, kind, layers, tensors)
    return None if result is None else _computed(result, compute)


def stored(name: Hashable, *kind: Hashable, layers: Sequence[HasModules]) -> Any:
    """The result that ``reused`` or ``reused_later`` stored of layers; None where there is none."""
    prepared = active()
    if prepared is None or is_transformed():
        return None
    (slot, _), kind = _slot(name, layers), (kind, _autocast())
    result = prepared.get(slot, kind)
    if result is None or not result.holds(()):
        return None
    prepared.put(slot, kind, result)
    return result.value


def reused_of_grid(
    compute: Callable[[Grid], T],
    name: Hashable,
    *kind: Hashable,
    grid: Grid,
    layers: Sequence[HasModules] = (),
    masked: bool = True,
) -> T:
    """``compute(grid)`` as by ``reused``, for layouts with the same numbers.

    Without layers it must not depend on signals; with them, it is computed where there are any.

    Args:
        masked: True if the result depends on causality, window and intervals of the grid.
    """
    sides = (grid.query,) if grid.key is grid.query else (grid.query, grid.key)
    if layers and any(side.signal is not None for side in sides):
        return compute(grid)
    tensors: tuple[Tensor | None, ...] = ()
    if masked:
        kind, tensors = (*kind, grid.band), (grid.intervals,)
    computed = partial(compute, grid)
    return reused_of_layouts(computed, name, *kind, layouts=sides, layers=layers, tensors=tensors)


def reused_of_layouts(
    compute: Callable[[], T],
    name: Hashable,
    *kind: Hashable,
    layouts: Sequence[Layout],
    layers: Sequence[HasModules] = (),
    tensors: Sequence[Tensor | None] = (),
) -> T:
    """``compute()`` as by ``reused``, from layouts with the same numbers but for signals."""
    if active() is None:
        return compute()
    positions = [layout.positions for layout in layouts]
    if wants_gradients(positions) or needs_dispatch(*positions):
        return compute()
    if not all(map(has_values, positions)):
        return compute()
    numbers = [x for layout in layouts for x in _numbers(layout)]
    kind = (*kind, *map(regular_kind, layouts))
    return reused(compute, name, *kind, layers=layers, tensors=[*numbers, *tensors])


def regular_kind(layout: Layout) -> Hashable:
    """The numbers of a layout that its tensors follow from where it is regular, and their kind."""
    positions, order = layout.positions, layout.order
    kind = positions.shape, positions.dtype, positions.device, order.shape
    return layout.start, layout.extent, *kind


def _numbers(layout: Layout) -> list[Tensor | None]:
    """Tensors of a layout that say more than ``regular_kind``, but for signals."""
    places = (None, None) if layout.start is not None else (layout.positions, layout.order)
    return [*places, layout.document, layout.valid, layout.special]


def _computed(result: _Result, compute: Callable[[], T]) -> T:
    if not result.computed:
        with torch.inference_mode(False), torch.no_grad():
            result.value = compute()
        result.computed = True
    return cast(T, result.value)


def _result(
    name: Hashable,
    kind: tuple[Hashable, ...],
    layers: Sequence[HasModules],
    tensors: Sequence[Tensor | None],
) -> _Result | None:
    """The entry of a result, which may be yet to be computed; None where nothing can be stored."""
    prepared = active()
    if prepared is None or is_transformed():
        return None
    (slot, owners), kind = _slot(name, layers), (kind, _autocast())
    result = prepared.get(slot, kind)
    if _is_capturing():
        if result is None or not result.computed:
            return None
        if result.states is not None and not result.states.met(tensors):
            return None
        result.pinned = True
    elif result is None or (result.computed and not result.holds(tensors)):
        result = _Result([ref(owner) for owner in owners])
        if owners or any(x is not None for x in tensors):
            prepared.put(slot, kind, result)
            return None
    elif not result.computed:
        modules = modules_of(layers)
        weights = tensors_of(modules)
        if not (_are_comparable([*weights, *tensors]) and all(map(_is_readable, weights))):
            return None
        if not are_known(modules):
            return None
        states = States(modules, [*weights, *tensors])
        result = _Result([ref(owner) for owner in owners], states)
    prepared.put(slot, kind, result)
    return result


def _slot(name: Hashable, layers: Sequence[HasModules]) -> tuple[Hashable, Sequence[nn.Module]]:
    """The key of results of a name and layers, and the modules in it.

    Kinds of one slot make room for one another.
    """
    owners: Sequence[Any] = layers
    for layer in layers:
        if not isinstance(layer, nn.Module):  # a function of modules
            owners = modules_of(layers)
    return (name, *map(id, owners)), owners


def _are_comparable(tensors: Sequence[Tensor | None]) -> bool:
    """True if the tensors have values to compare, and no gradient or operation is recorded."""
    if needs_dispatch(*tensors) or is_scripted():
        return False
    recording = torch.is_grad_enabled()
    for x in tensors:  # no generator: this is asked at each call
        if x is not None and (x.is_meta or (recording and x.requires_grad)):
            return False
    return True


def _is_capturing() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def wants_gradients(tensors: Sequence[Tensor]) -> bool:
    """True if autograd is to record what is computed with one of them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def constant(values: Sequence[float], *, like: Tensor) -> Tensor:
    """Numbers as a tensor of the dtype and device of another, made once.

    On a CUDA device a new one waits for all that the device has yet to do.
    """
    if active() is None or needs_dispatch(like) or not has_values(like):
        return like.new_tensor(values)
    name = ("constant", *values)
    return reused(lambda: like.new_tensor(values), name, like.dtype, like.device)


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
        tensors: theirs, and others after them.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor | None]) -> None:
        self._modules = [(ref(x), _parts(x, []), _settings(x).items()) for x in modules]
        self._others = [None if x is None else ref(x) for x in tensors[len(tensors_of(modules)) :]]
        self.copies = Copies(tensors)

    def met(self, others: Sequence[Tensor | None]) -> bool:
        """True if there are no modules, and these are the very tensors that were recorded."""
        same = (x is (was and was()) for x, was in zip(others, self._others, strict=True))
        return not self._modules and all(same)

    def weights(self) -> list[Tensor] | None:
        """The tensors that the modules have now; None if a module changed or is observed."""
        if self._modules and _observes_all():
            return None
        weights: list[Tensor] = []
        for was, parts, settings in self._modules:
            module = was()
            if module is None or module._forward_hooks or module._forward_pre_hooks:
                return None
            if _parts(module, weights) != parts or not settings <= vars(module).items():
                return None
        return weights


SETTINGS = (bool, int, float, str, type(None), torch.dtype)

NO_SETTINGS = frozenset(vars(nn.Module())) - {"training"} | {"given", "prepared"}
"""Attributes of ``nn.Module``, arguments of constructors, and results."""


def _settings(module: nn.Module) -> dict[str, object]:
    """Attributes of the module that ``nn.Module`` does not have and that results may depend on."""
    return {n: x for n, x in vars(module).items() if n not in NO_SETTINGS and not _is_method(x)}


def _is_method(x: object) -> bool:
    """True of a method of PyTorch or posenc that a module has in place of its class's."""
    function = x.__func__ if isinstance(x, MethodType) else None
    return isinstance(function, FunctionType) and function.__module__.startswith(PLAIN)


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


def _parts(module: nn.Module, tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """The class of a module, how many attributes it has, its modules, and which tensors it has.

    Appends them to ``tensors``.
    """
    names = []
    for table in (module._parameters, module._buffers):
        for name, x in table.items():
            if x is not None:
                names.append(name)
                tensors.append(x)
    return type(module), len(vars(module)), *map(id, module._modules.values()), *names


def modules_of(layers: Sequence[HasModules]) -> list[nn.Module]:
    """All modules that the layers read."""
    return [module for layer in layers for module in layer.modules()]


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of the modules themselves."""
    tensors: list[Tensor] = []
    for module in modules:
        _parts(module, tensors)
    return tensors


def _observes_all() -> bool:
    """True while hooks observe each call of any module."""
    every = nn.modules.module
    return bool(every._global_forward_hooks or every._global_forward_pre_hooks)


def is_plain(module: nn.Module) -> bool:
    """True of a layer of PyTorch or posenc that computes by its parameters, unobserved."""
    hooked = module._forward_hooks or module._forward_pre_hooks or _observes_all()
    drops = module.training and isinstance(module, nn.modules.dropout._DropoutNd)
    forward = vars(module).get("forward")
    changed = hooked or drops or not (forward is None or _is_method(forward))
    return type(module).__module__.startswith(PLAIN) and not changed


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True of an unobserved ``nn.Linear`` with a bias, whose backward has no hooks either."""
    every = nn.modules.module
    backward = module._backward_hooks or module._backward_pre_hooks
    backward = backward or every._global_backward_hooks or every._global_backward_pre_hooks
    linear = isinstance(module, nn.Linear) and module.bias is not None
    return linear and is_plain(module) and not backward


def _is_readable(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
