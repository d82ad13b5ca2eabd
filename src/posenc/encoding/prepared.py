"""Results of calls that later calls reuse, while all that they were made from is unchanged."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol, Self, TypeGuard, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import PLAIN_TENSORS, has_values, needs_dispatch

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
        states: None where there are none to compare, and after the first call of its kind.
        computed: False before the result is there.
        pinned: True if a CUDA graph may read its tensors.
    """

    states: States | None = None
    value: object = None
    computed: bool = False
    pinned: bool = False

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        """True if its states are as they were; if it has none, that none are to be compared."""
        if self.states is None:
            return not (self.computed and tensors and any(x is not None for x in tensors))
        return self.states.hold(tensors)


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
        self._slots: dict[tuple[Any, ...], dict[Hashable, _Result]] = {}

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

    def slot(self, name: Hashable, layers: Sequence[HasModules]) -> dict[Hashable, _Result]:
        """Results of a name and layers by their kinds, the last used last; apart under autocast.

        A new slot takes the place of those whose layers are gone.
        """
        owners: Sequence[Any] = layers
        for layer in layers:
            if not isinstance(layer, nn.Module):  # a function of modules
                owners = modules_of(layers)
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        key = (name, autocast, *map(ref, owners))
        results = self._slots.get(key)
        if results is None:
            for other in list(self._slots):
                for owner in other[2:]:
                    if owner() is None:
                        self._slots.pop(other, None)
            results = self._slots[key] = {}
        return results


_ENTERED: ContextVar[tuple[Prepared, ...]] = ContextVar("_ENTERED", default=())


def entering(prepared: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """The context itself, or nothing in code that is traced, which may leave the graph in it."""
    return nullcontext() if torch.compiler.is_compiling() else prepared


def active() -> Prepared | None:
    """The first ``Prepared`` that was entered and not left.

    None in code that is traced, watched or transformed.
    """
    if needs_dispatch() or torch._C._is_tracing():
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
    if result is None:
        return compute()
    if not result.computed:
        _compute(result, compute)
    return cast(T, result.value)


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
    if result is not None and not result.computed:
        _compute(result, compute)
    return None if result is None else cast(T, result.value)


def stored(
    name: Hashable,
    kind: Hashable,
    layers: Sequence[HasModules],
    tensors: Sequence[Tensor | None],
    otherwise: Prepared,
) -> Any:
    """The result that ``reused_later`` stored; None where there is none.

    Only for code that is neither traced, watched nor transformed.

    Args:
        otherwise: where it was stored if nothing is entered now.
    """
    entered = _ENTERED.get()
    results = (entered[0] if entered else otherwise).slot(name, layers)
    result = results.get(kind)
    if result is None or result.states is None or not result.states.hold(tensors):
        return None
    results[kind] = results.pop(kind, result)  # the last used
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
    if layers and (grid.query.signal is not None or grid.key.signal is not None):
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
    numbers = list(tensors)
    for layout in layouts:
        positions, order = layout.positions, layout.order
        if needs_dispatch(positions) or positions.is_meta:
            return compute()
        if positions.requires_grad and torch.is_grad_enabled():
            return compute()
        kind = (*kind, layout.start, layout.extent, positions.shape, order.shape)
        kind = (*kind, positions.dtype, positions.device)
        if layout.start is None:  # else they follow from it
            numbers += (positions, order)
        numbers += (layout.document, layout.valid, layout.special)
    return reused(compute, name, *kind, layers=layers, tensors=numbers)


def _compute(result: _Result, compute: Callable[[], object]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        result.value = compute()
    result.computed = True


def _result(
    name: Hashable,
    kind: tuple[Hashable, ...],
    layers: Sequence[HasModules],
    tensors: Sequence[Tensor | None],
) -> _Result | None:
    """The entry of a result, which may be yet to be computed; None where nothing can be stored."""
    prepared = active()
    if prepared is None:
        return None
    results = prepared.slot(name, layers)
    result = results.get(kind)
    if _is_capturing():
        if result is None or not result.computed:
            return None
        if result.states is not None and not result.states.met(tensors):
            return None
        result.pinned = True
    elif result is None or not result.holds(tensors):
        result = _Result()
        if layers or (tensors and any(x is not None for x in tensors)):
            _put(results, kind, result)
            return None
    elif not result.computed and result.states is None:
        modules = modules_of(layers)
        weights = tensors_of(modules)
        compared = [*weights, *tensors]
        if not (_are_comparable(compared) and all(map(_is_readable, weights))):
            return None
        if not are_known(modules):
            return None
        result = _Result(States(modules, compared))
    _put(results, kind, result)
    return result


def _put(results: dict[Hashable, _Result], kind: Hashable, result: _Result) -> None:
    """Store a result as the last used of its slot, in which the first used makes room."""
    results.pop(kind, None)
    excess = len(results) + 1 - MOST
    if excess > 0:
        unread = [old for old, x in list(results.items()) if not x.pinned]
        for old in unread[:excess]:
            results.pop(old, None)
    results[kind] = result


def _are_comparable(tensors: Sequence[Tensor | None]) -> bool:
    """True if the tensors have values to compare, and no gradient is recorded."""
    recording = torch.is_grad_enabled()
    for x in tensors:  # no generator: this is asked at each call
        if x is None:
            continue
        if type(x) not in PLAIN_TENSORS or x.is_neg() or x.is_meta:
            return False
        if recording and x.requires_grad:
            return False
    return True


def _is_capturing() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def constant(values: Sequence[float], *, like: Tensor) -> Tensor:
    """Numbers as a tensor of the dtype and device of another; made once on other devices than CPUs.

    On a CUDA device a new one waits for all that the device has yet to do.
    """
    if like.is_cpu or needs_dispatch(like) or not has_values(like):
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

        Waits for devices other than the CPU. Not for tensors of ``torch.func``, which have no bits.
        """
        if len(tensors) != len(self.copies):
            return False
        for x, copy in zip(tensors, self.copies, strict=True):  # no function: this is at each call
            if x is None or copy is None:
                if x is not copy:
                    return False
                continue
            if (x.dtype, x.shape, x.device) != (copy.dtype, copy.shape, copy.device):
                return False
            x = x.detach().contiguous()
            if x.is_cpu:
                if _compare(x.data_ptr(), copy.data_ptr(), copy.nbytes):
                    return False
            elif not torch.equal(*(side.flatten().view(torch.uint8) for side in (x, copy))):
                return False
        return True


class States:
    """Recorded states of modules and tensors: classes, settings, submodules, and all bits.

    Args:
        modules: whose settings can be compared, see ``are_known``.
        tensors: theirs, and others after them.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Sequence[Tensor | None]) -> None:
        self._modules = [(ref(x), _settings(x).items()) for x in modules]
        self._parts, weights = _read(modules)
        self._others = [None if x is None else ref(x) for x in tensors[len(weights) :]]
        self._copies = Copies(tensors)

    def met(self, others: Sequence[Tensor | None]) -> bool:
        """True if there are no modules, and these are the very tensors that were recorded."""
        same = (x is (was and was()) for x, was in zip(others, self._others, strict=True))
        return not self._modules and all(same)

    def hold(self, others: Sequence[Tensor | None]) -> bool:
        """True if modules and tensors are as they were recorded, unobserved and without gradients.

        Args:
            others: the tensors beside the modules' own.
        """
        every, modules = nn.modules.module, []
        if self._modules and (every._global_forward_hooks or every._global_forward_pre_hooks):
            return False
        for was, settings in self._modules:
            module = was()
            if module is None or module._forward_hooks or module._forward_pre_hooks:
                return False
            if not settings <= vars(module).items():
                return False
            modules.append(module)
        parts, weights = _read(modules)
        compared = [*weights, *others]
        return parts == self._parts and _are_comparable(compared) and self._copies.hold(compared)


SETTINGS = (bool, int, float, str, type(None), torch.dtype)

NO_SETTINGS = frozenset(vars(nn.Module())) - {"training"} | {"given", "prepared", "_inner"}
"""Attributes of ``nn.Module``, arguments of constructors, and results."""


def _settings(module: nn.Module) -> dict[str, object]:
    """Attributes of the module that ``nn.Module`` does not have and that results may depend on."""
    return {n: x for n, x in vars(module).items() if n not in NO_SETTINGS}


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


def _read(modules: Sequence[nn.Module]) -> tuple[list[object], list[Tensor]]:
    """The make-up of modules, and the tensors that hold their numbers.

    The class of each module, how many attributes it has, its modules, and which tensors it has.
    """
    parts: list[object] = []
    tensors: list[Tensor] = []
    for module in modules:
        parts += (type(module), len(vars(module)), *map(id, module._modules.values()))
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None:
                    parts.append(name)
                    tensors.append(x)
    return parts, tensors


def modules_of(layers: Sequence[HasModules]) -> list[nn.Module]:
    """All modules that the layers read."""
    return [module for layer in layers for module in layer.modules()]


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of the modules themselves."""
    return _read(modules)[1]


def is_plain(module: nn.Module) -> bool:
    """True of a layer of PyTorch or posenc that computes by its parameters, unobserved."""
    every = nn.modules.module
    hooked = module._forward_hooks or module._forward_pre_hooks
    hooked = hooked or every._global_forward_hooks or every._global_forward_pre_hooks
    drops = module.training and isinstance(module, nn.modules.dropout._DropoutNd)
    changed = hooked or drops or "forward" in vars(module)
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
