"""Records to and from JSON values, and options from text, each value by its type."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import cattrs
from cattrs.v import format_exception

from posenc.arguments import check
from posenc.errors import ArgumentError, CheckpointError, PosencError, UnknownNameError

Record = TypeVar("Record")

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

PLAIN = cattrs.Converter(forbid_extra_keys=True)
"""Values as JSON has them, of exactly the types that records ask for."""

TEXT = cattrs.Converter()
"""Values as users write them."""


class Mismatch(TypeError):
    """A value of another type than its field's."""


def to_plain(record: object) -> dict[str, Any]:
    """The fields of a dataclass as JSON values."""
    plain: dict[str, Any] = PLAIN.unstructure(record)
    return plain


def from_plain(kind: type[Record], plain: object) -> Record:
    """A record from its fields as JSON has them.

    Args:
        kind: a dataclass of numbers, texts, truth values, paths, sequences, mappings and other
            such records.
        plain: the JSON value.

    Raises:
        TypeError: when it is no object of exactly these fields, or a value is of another type or
            is refused by the record; with the places of the first three.
    """
    try:
        return PLAIN.structure(plain, kind)
    except Exception as error:  # JSON can hold anything
        reasons = cattrs.transform_error(error, path=kind.__name__, format_exception=_reason)
        raise TypeError("; ".join(reasons[:3])) from error


def restore(kind: type[Record], plain: object, where: str, *, expected: str, remedy: str) -> Record:
    """``from_plain`` of stored values.

    Args:
        kind, plain: see there.
        where: the file or record, for the message.
        expected, remedy: for the message.

    Raises:
        CheckpointError: for any other value.
    """
    try:
        return from_plain(kind, plain)
    except TypeError as error:
        raise CheckpointError(where, expected=expected, got=error, remedy=remedy) from error


def parse_options(
    items: Iterable[str],
    parameters: Mapping[str, Parameter],
    *,
    of: str,
    words: Collection[str] = (),
) -> dict[str, Any]:
    """Options from ``name=value`` texts, by name.

    Args:
        items: the texts.
        parameters: the valid options, as ``posenc.arguments.domains`` returns them.
        of: name of the method or task, for messages.
        words: what else could stand in an item's place, for messages.

    Raises:
        UnknownNameError: on a name that is no option.
        ArgumentError: on an item without a value, or a value out of its option's domain.
    """
    options = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name not in parameters:
            raise UnknownNameError.of(f"option of {of}", name, [*words, *parameters])
        if not equals:
            raise ArgumentError(
                name,
                expected="NAME=VALUE",
                got=repr(item),
                remedy=f"Write {name}=…, for example {name}={parameters[name].default}.",
            )
        options[name] = parse_option(name, parameters[name], text)
    return options


def parse_option(name: str, parameter: Parameter, text: str) -> Any:
    """``text`` parsed as a value of the parameter's type and domain.

    Truth values are ``true`` and ``false`` (or yes, no, on, off), a missing value is ``none``, and
    the items of sequences stand between commas, in brackets or not.

    Raises:
        UnknownNameError: on a name that is not among those the parameter allows.
        ArgumentError: on any other text.
    """
    value = _read(text.strip(), parameter.annotation)
    return check(name, parameter.annotation, value, parameter.default)


def _read(text: str, kind: Any) -> Any:
    """``text`` in the type ``kind``, or unchanged where it is no such value."""
    try:
        return TEXT.structure(text, kind)
    except Exception:  # users can write anything; the check that follows says what is wrong
        return text


def _reason(error: BaseException, kind: type | None) -> str:
    known = isinstance(error, Mismatch | PosencError)
    return str(error) if known else format_exception(error, kind)


def _exact(*kinds: type) -> Callable[[Any, Any], Any]:
    """A hook that takes values of these types alone."""

    def structure(value: Any, kind: Any) -> Any:
        if type(value) not in kinds:
            raise Mismatch(f"expected {kind.__name__}, got {str(value)[:80]!r}")
        return kind(value)

    return structure


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list, Sequence)


def _items(value: Any, kind: Any) -> Any:
    """A sequence from a JSON array."""
    kinds = get_args(kind)
    fixed = get_origin(kind) is tuple and kinds[-1] is not ...
    if not isinstance(value, list | tuple) or (fixed and len(value) != len(kinds)):
        raise Mismatch(f"expected {len(kinds) if fixed else 'any number of'} items, got {value!r}")
    wanted = kinds if fixed else kinds[:1] * len(value)
    items = [PLAIN.structure(*pair) for pair in zip(value, wanted, strict=True)]
    return items if get_origin(kind) is list else tuple(items)


def _has_whole_keys(kind: Any) -> bool:
    return get_origin(kind) is Mapping and get_args(kind)[0] is int


def _by_whole_keys(value: Any, kind: Any) -> dict[int, Any]:
    """A mapping from whole numbers, which JSON objects have as strings."""
    return {int(key): PLAIN.structure(item, get_args(kind)[1]) for key, item in value.items()}


def _items_of_text(text: str, kind: Any) -> tuple[Any, ...]:
    inner = text.strip("()[]") if text.startswith(("(", "[")) else text
    items = (item.strip() for item in inner.split(","))
    return tuple(_read(item, get_args(kind)[0]) for item in items if item)


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (typing.Union, types.UnionType) and type(None) in get_args(kind)


def _optional_of_text(text: str, kind: Any) -> Any:
    if text.lower() == "none":
        return None
    return _read(text, next(inner for inner in get_args(kind) if inner is not type(None)))


for plain_type in (bool, int, str):
    PLAIN.register_structure_hook(plain_type, _exact(plain_type))
PLAIN.register_structure_hook(float, _exact(int, float))
PLAIN.register_structure_hook_func(_is_sequence, _items)
PLAIN.register_structure_hook_func(_has_whole_keys, _by_whole_keys)
TEXT.register_structure_hook(Path, lambda text, _: Path(text) if text else text)  # "": no path
TEXT.register_structure_hook(bool, lambda text, _: TRUTHS[text.lower()])
TEXT.register_structure_hook_func(_is_sequence, _items_of_text)
TEXT.register_structure_hook_func(_is_optional, _optional_of_text)
