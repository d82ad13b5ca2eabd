"""Records (dataclasses) from the values of a JSON file, each value of the type it should have."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["record"]

Record = TypeVar("Record")


def record(kind: type[Record], plain: object) -> Record:
    """A record from its fields as JSON has them.

    Args:
        kind: a dataclass of numbers, texts, truth values, paths, lists, tuples, mappings and
            other such records.
        plain: the JSON value.

    Raises:
        TypeError: when it is no object of exactly these fields, or a value is of another type.
    """
    if not isinstance(plain, dict):
        raise TypeError(f"{type(plain).__name__} instead of the fields of a {kind.__name__}")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = {
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    }
    if not needed <= plain.keys() <= known.keys():
        odd = sorted(needed - plain.keys()) or sorted(plain.keys() - known.keys())
        raise TypeError(f"{odd[0]} in no or too many fields of a {kind.__name__}")
    return kind(**{name: _value(hints[name], value, name) for name, value in plain.items()})


def _value(kind: Any, value: Any, name: str) -> Any:
    """A value of a type, from what JSON has for it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (each for each in arguments if each is not type(None))
        return _value(kind, value, name)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and arguments[-1] is not ... and isinstance(value, list):
        return tuple(_value(k, v, name) for k, v in zip(arguments, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _value(arguments[1], each, name) for key, each in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, list):
        items = [_value(arguments[0], each, name) for each in value]
        return items if origin is list else tuple(items)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return record(kind, value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    raise TypeError(f"{name} = {str(value)[:80]!r}")
