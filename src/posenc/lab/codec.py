"""Records to and from JSON values, each value by its type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

import cattrs
from cattrs.v import format_exception

from posenc.errors import CheckpointError, PosencError

Record = TypeVar("Record")

PLAIN = cattrs.Converter(forbid_extra_keys=True)
"""Values as JSON has them, of exactly the types that records ask for."""


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


for plain_type in (bool, int, str):
    PLAIN.register_structure_hook(plain_type, _exact(plain_type))
PLAIN.register_structure_hook(float, _exact(int, float))
PLAIN.register_structure_hook_func(_is_sequence, _items)
PLAIN.register_structure_hook_func(_has_whole_keys, _by_whole_keys)
