"""Records as flat arguments of ``torch.library`` operators, and back.

Operators take lists of tensors and numbers, no records. Tensors go by their paths in the record
(``"terms.left_rows"``), which the words hold, so that gradients come back by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

from torch import Tensor

T = TypeVar("T")


class Flat(NamedTuple):
    """A record in lists.

    Args:
        tensors: those that are there.
        numbers: integers and truths, which may be symbolic.
        reals: floats.
        words: the path of each tensor, then the strings.
    """

    tensors: list[Tensor]
    numbers: list[int]
    reals: list[float]
    words: str


class RecordField(NamedTuple):
    """A field of a record.

    Args:
        name, path: in its own record, and in the whole.
        kind: ``"tensor"``, ``"tensors"``, ``"number"``, ``"truth"``, ``"real"``, ``"word"`` or
            ``"record"``.
        inner: of a record.
    """

    name: str
    path: str
    kind: str
    inner: Schema | None


class Schema(NamedTuple):
    """The fields of a dataclass, by its annotations."""

    type: type
    fields: tuple[RecordField, ...]


KINDS: dict[Any, str] = {int: "number", bool: "truth", float: "real", str: "word"}


def schema_of(record: type, prefix: str = "") -> Schema:
    """The schema of a dataclass.

    ``Tensor | None`` and its shaped forms, ``tuple[Tensor, ...]``, ``int``, ``bool``, ``float``,
    ``str`` and other dataclasses are understood.
    """
    schema_fields, hints = [], get_type_hints(record)
    for name in (field.name for field in fields(record)):
        hint, path, inner = hints[name], prefix + name, None
        kind = KINDS.get(hint, "tensors" if "tuple" in str(hint) else "tensor")
        if is_dataclass(hint):
            kind, inner = "record", schema_of(hint, f"{path}.")  # type: ignore[arg-type]
        schema_fields.append(RecordField(name, path, kind, inner))
    return Schema(record, tuple(schema_fields))


def flatten(record: object, schema: Schema) -> Flat:
    """The fields of a record in lists."""
    paths: list[str] = []
    words: list[str] = []
    flat = Flat([], [], [], "")
    _collect(record, schema, flat, paths, words)
    return flat._replace(words="|".join([" ".join(paths), *words]))


def _collect(
    record: object, schema: Schema, flat: Flat, paths: list[str], words: list[str]
) -> None:
    for name, path, kind, inner in schema.fields:
        value: Any = getattr(record, name)
        if kind == "tensor":
            if value is not None:
                flat.tensors.append(value)
                paths.append(path)
        elif kind == "number":
            flat.numbers.append(value)
        elif kind == "truth":  # compilers take no truths among symbolic numbers
            flat.numbers.append(1 if value else 0)
        elif kind == "real":
            flat.reals.append(value)
        elif kind == "word":
            words.append(value)
        elif inner is None:
            flat.tensors.extend(value)
            paths.extend([f"{path}.{at}" for at in range(len(value))])
        else:
            _collect(value, inner, flat, paths, words)


def restore(flat: Flat, schema: Schema) -> Any:
    """The record that ``flatten`` made lists of."""
    present, *words = flat.words.split("|")
    tensors = dict(zip(present.split(), flat.tensors, strict=True))
    return _record(schema, tensors, iter(flat.numbers), iter(flat.reals), iter(words))


def _record(
    schema: Schema,
    tensors: dict[str, Tensor],
    numbers: Iterator[int],
    reals: Iterator[float],
    words: Iterator[str],
) -> Any:
    record: Any = object.__new__(schema.type)  # what is in it was checked before
    state = record.__dict__
    for name, path, kind, inner in schema.fields:
        if kind == "tensor":
            state[name] = tensors.get(path)
        elif kind == "number":
            state[name] = next(numbers)
        elif kind == "truth":
            state[name] = bool(next(numbers))
        elif kind == "real":
            state[name] = next(reals)
        elif kind == "word":
            state[name] = next(words)
        elif inner is None:
            state[name] = tuple(x for at, x in tensors.items() if at.startswith(f"{path}."))
        else:
            state[name] = _record(inner, tensors, numbers, reals, words)
    return record


def paths_of(words: str) -> list[str]:
    """The path of each tensor, from ``Flat.words``."""
    return words.split("|")[0].split()
