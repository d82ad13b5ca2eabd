"""Validation of arguments against domains given as annotations.

A constructor or factory annotates its parameters with the domains below and is decorated with
``checked``; a part of an encoding annotates its attributes, see ``declare``. Types are strict:
``True`` is not a number, ``1.5`` not a count, ``"8"`` neither.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, InitVar, dataclass, field, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import nn

from posenc.errors import ArgumentError, UnknownNameError

P = ParamSpec("P")
R = TypeVar("R")

EXACT = 2**53
"""Integers up to here are exact in float64, as positions are."""

ROOMY, LONG = 2**25, 2**13
"""Memory is estimated only if the product, or the largest, of the sizes reaches these."""

GIB = 2**30


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``.

    Args:
        low, high: the bounds.
        above, below: exclude the lower (upper) bound itself.
        multiple: of which they are multiples.
        remedy: for a number that is not among them.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    multiple: int = 1
    remedy: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low or (not self.above and value == self.low)
        below = value < self.high or (not self.below and value == self.high)
        return above and below and (self.multiple == 1 or value % self.multiple == 0)

    def describe(self, value: float) -> str:
        """The violated bounds in words, such as ``1 or more``; the upper one only above it."""
        ends = []
        if self.low > -EXACT or value < self.low:
            low = _number_text(self.low)
            ends.append(f"more than {low}" if self.above else f"{low} or more")
        if value > self.high or (self.below and value == self.high) or self.high <= 1:
            ends.append(f"{'less than' if self.below else 'at most'} {_number_text(self.high)}")
        return ", ".join(ends)


Count = Annotated[int, Interval(1, 2**16)]
"""A number of heads, buckets, layers or kernel taps."""

Buckets = Annotated[int, Interval(2, 1024)]
"""A number of distance buckets with exact integer boundaries."""

Width = Annotated[int, Interval(1, 2**20)]
"""A number of features."""

EvenWidth = Annotated[int, Interval(2, 2**20, multiple=2, remedy="Features come in pairs.")]
"""A number of features in pairs."""

QuarterWidth = Annotated[
    int, Interval(4, 2**20, multiple=4, remedy="Features come in pairs, half of them per axis.")
]
"""A number of features in pairs, half of the pairs for each of two axes."""

Length = Annotated[int, Interval(1, EXACT)]
"""A number of tokens or positions, at least 1."""

Natural = Annotated[int, Interval(0, EXACT)]
"""A whole number from 0."""

Positive = Annotated[float, Interval(1e-12, 1e12)]
"""A positive number, far from float32 overflow and underflow."""

Rate = Annotated[float, Interval(0, above=True, below=True)]
"""Any number above 0."""

Base = Annotated[float, Interval(1, 1e30, above=True)]
"""Ratio of the highest frequency to the lowest."""

Magnitude = Annotated[float, Interval(0, 1e6)]
"""Standard deviation or bound of initial values."""

Factor = Annotated[float, Interval(1e-6, 1e6)]
"""A multiplier of vectors or logits."""

Divisor = Annotated[float, Interval(1e-6)]
"""A divisor of a frequency; infinite, it makes it 0."""

Probability = Annotated[float, Interval(0, 1, below=True)]
"""A dropout probability."""

Fraction = Annotated[float, Interval(1e-6, 1)]
"""A fraction above 0."""

Share = Annotated[float, Interval(0, 1)]
"""A fraction from 0."""


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Check keyword arguments against their annotations, then call.

    Raises: as ``check``.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kwargs.update(_checked(function, kwargs))
        return function(*args, **kwargs)

    return call


def _checked(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, Any]:
    """The keyword arguments that have annotations, checked."""
    parameters = domains(function)
    return {
        name: check(name, parameters[name].annotation, value, parameters[name].default)
        for name, value in arguments.items()
        if name in parameters
    }


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check keyword arguments against their annotations, then call.

    The function receives numbers as ``int`` and ``float`` and sequences as tuples. Memory is
    estimated before anything is allocated. A constructed object keeps the arguments as ``given``.

    Raises: as ``check``; also ArgumentError if the module would not fit into memory.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kwargs.update(_checked(function, kwargs))
        _require_memory(lambda: _make(function, *args, **kwargs), _sizes(kwargs, domains(function)))
        result = function(*args, **kwargs)
        if args:  # a constructor
            vars(args[0])["given"] = kwargs
        return result

    return call


def declare(kind: type[nn.Module]) -> None:
    """Give a module the constructor that its annotated attributes describe, as of a dataclass.

    They are its keyword-only arguments, checked as by ``checked``, and stored by their names.
    ``__post_init__`` is called then, with the values of those that are ``InitVar``, and last
    ``reset_parameters``, if the module has it.
    """
    for name in inspect.get_annotations(kind):
        if name not in vars(kind):  # or its default would be an inherited attribute
            setattr(kind, name, field())
    store = dataclass(kw_only=True, eq=False, repr=False)(kind).__init__
    own, *others = signature(store).parameters.values()
    if not (others or hasattr(kind, "__post_init__")):
        del kind.__init__
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [name for base in kind.__mro__ for name in inspect.get_annotations(base)]
    others.sort(key=lambda parameter: names.index(parameter.name))
    vars(store)["__signature__"] = Signature([own, *others])
    for name in (parameter.name for parameter in others):
        hint = hints[name]
        store.__annotations__[name] = hint.type if isinstance(hint, InitVar) else hint
        if name in vars(kind):  # a default, which would hide a submodule or parameter
            delattr(kind, name)

    @functools.wraps(store)
    def construct(self: nn.Module, **arguments: object) -> None:
        nn.Module.__init__(self)
        store(self, **arguments)
        if hasattr(kind, "reset_parameters"):
            kind.reset_parameters(self)

    kind.__init__ = checked(construct)  # type: ignore[method-assign]


def _make(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """The result of a factory, or a new module initialised by the constructor ``function``."""
    if not args:
        return function(*args, **kwargs)
    kind = type(args[0])
    module = kind.__new__(kind)
    function(module, **kwargs)
    return module


def _sizes(
    arguments: Mapping[str, object], parameters: Mapping[str, Parameter]
) -> list[tuple[str, int]]:
    """Integer arguments above 1, including those in sequences."""
    sizes = []
    for name, parameter in parameters.items():
        value = arguments.get(name, parameter.default)
        items = value if isinstance(value, tuple) else (value,)
        sizes += [(name, item) for item in items if isinstance(item, int) and item > 1]
    return sizes


def domains(function: Callable[..., object]) -> Mapping[str, Parameter]:
    """The keyword-only parameters of a function or class, with resolved annotations."""
    return _domains(getattr(function, "__wrapped__", function))


@functools.cache
def _domains(function: Callable[..., object]) -> Mapping[str, Parameter]:
    if isinstance(function, type):
        return domains(function.__init__)  # type: ignore[misc]
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name])
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY and name in hints
    }


def check(name: str, annotation: Any, value: object, default: object = Parameter.empty) -> Any:
    """``value`` converted to the type of ``annotation``.

    Args:
        name: of the argument, for messages.
        annotation: a type, ``Annotated`` with an ``Interval``, ``Literal``, optional, or a
            sequence of these.
        value: the argument.
        default: of the parameter, for the remedy.

    Raises:
        UnknownNameError: for a name that the ``Literal`` does not list.
        ArgumentError: for any other value outside the domain.
    """
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in get_args(annotation):
            return None
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        kind = kinds[-1] if isinstance(value, Sequence) else kinds[0]  # of a value or a sequence
        return check(name, kind, value, default)
    if origin is Literal:
        if not isinstance(value, str):
            raise _invalid(name, f"one of {get_args(annotation)}", value, default)
        if value not in get_args(annotation):
            raise UnknownNameError.of(name, value, get_args(annotation))
        return value
    if origin is Annotated:
        kind, *others = get_args(annotation)
        for other in others:
            if isinstance(other, Interval):
                return _number(name, kind, value, default, other)
        return check(name, kind, value, default)
    if annotation in (int, float):
        return _number(name, annotation, value, default, Interval(-EXACT, EXACT))
    if origin in (tuple, Sequence):
        return _sequence(name, annotation, value, default)
    kind = origin or annotation
    if isinstance(kind, type) and not isinstance(value, kind):
        raise _invalid(name, _type_name(kind), value, default)
    return value


def check_fields(record: object) -> None:
    """Check the fields of a dataclass against their annotations, from its ``__post_init__``.

    Numbers become plain ``int`` and ``float``, sequences tuples, in frozen records too.

    Raises: as ``check``.
    """
    kind: Any = type(record)
    for name, (shown, annotation, default) in _fields(kind).items():
        object.__setattr__(record, name, check(shown, annotation, getattr(record, name), default))


@functools.cache
def _fields(kind: Any) -> Mapping[str, tuple[str, Any, object]]:
    """Name in messages, annotation and default of each field of a dataclass, by field name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: (
            _shown_name(hints[field.name]) or field.name,
            hints[field.name],
            Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    }


def _shown_name(annotation: Any) -> str:
    """The name that the metadata of an annotation has for messages, or nothing."""
    return "".join(getattr(note, "name", "") for note in getattr(annotation, "__metadata__", ()))


def head_width(dim: int, heads: int) -> int:
    """Width of a head, ``dim / heads``.

    Raises:
        ArgumentError: unless it is a whole number.
    """
    if dim % heads:
        raise ArgumentError(
            "dim",
            expected=f"a multiple of heads ({heads})",
            got=dim,
            remedy="Change dim or heads, or give head_dim.",
        )
    return dim // heads


def _number(name: str, kind: type, value: object, default: object, interval: Interval) -> float:
    domain = "a whole number" if kind is int else "a finite number"
    if interval.multiple > 1:
        domain = (
            "an even number" if interval.multiple == 2 else f"a multiple of {interval.multiple}"
        )
    try:
        truth = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
        if truth or isinstance(value, (str, bytes)):
            raise TypeError
        number = operator.index(value) if kind is int else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if number in interval:
        return number
    condition = interval.describe(number)
    expected = f"{domain}, {condition}" if condition else domain
    raise _invalid(name, expected, value, default, interval.remedy)


def _sequence(name: str, annotation: Any, value: object, default: object) -> tuple[Any, ...]:
    kinds = get_args(annotation)
    fixed = get_origin(annotation) is tuple and kinds[-1] is not Ellipsis
    expected = f"{len(kinds)} values" if fixed else "a sequence of values"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _invalid(name, expected, value, default)
    try:
        items = tuple(value)
    except TypeError:  # a tensor without dimensions
        raise _invalid(name, expected, value, default) from None
    if fixed and len(items) != len(kinds):
        raise _invalid(name, expected, value, default)
    kinds = kinds if fixed else kinds[:1] * len(items)
    return tuple(check(name, kind, item, default) for kind, item in zip(kinds, items, strict=True))


def _invalid(
    name: str, expected: str, value: object, default: object, remedy: str = ""
) -> ArgumentError:
    try:
        got = repr(value)
    except ValueError:  # Python writes no integers of more than 4,300 digits
        got = "a number of thousands of digits"
    got = got if len(got) <= 80 else f"{got[:77]}…"
    if default is Parameter.empty:
        usual = "Use the model's value."
    else:
        usual = "Leave it out." if default is None else f"The default is {default!r}."
    return ArgumentError(name, expected=expected, got=got, remedy=remedy or usual)


def _type_name(kind: type) -> str:
    names = {bool: "True or False", str: "a string", Mapping: "a mapping", Path: "a path"}
    return names.get(kind, kind.__name__)


def _number_text(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _require_memory(make: Callable[[], object], sizes: Sequence[tuple[str, int]]) -> None:
    """Raise ArgumentError, naming the largest size, if the module is too large to be trained.

    Modules of large ``sizes`` are made on the meta device, which allocates nothing.
    """
    large = math.prod(size for _, size in sizes) >= ROOMY or any(size >= LONG for _, size in sizes)
    if not large or torch.get_default_device().type == "meta":
        return
    limit = memory() // 4  # gradients and an optimiser's two moments take as much each
    try:
        with torch.device("meta"):
            module = make()
        needed = _bytes(module) if isinstance(module, nn.Module) else 0
    except (OverflowError, MemoryError, RuntimeError):
        # more than 2^63 elements
        needed = None
    if needed is not None and needed <= limit:
        return
    name, size = max(sizes, key=lambda named: named[1])
    amount = "more than 2^63 elements" if needed is None else f"{needed / GIB:,.0f} GiB"
    raise ArgumentError(
        name,
        expected=f"parameters that fit into {limit / GIB:,.0f} GiB of memory",
        got=f"{size:,}, which needs {amount}",
        remedy="Use smaller sizes.",
    )


def _bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory() -> int:
    """Bytes of physical memory; 2^40 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**40
