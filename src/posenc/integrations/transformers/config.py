"""Validated reading of a transformers ``config.json``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from posenc import storage
from posenc.errors import CheckpointError

__all__ = ["SAVE_AGAIN", "Fields", "read_json", "read_object"]

Choice = TypeVar("Choice")
REQUIRED: Any = object()
SAVE_AGAIN = "Save it again; nothing was loaded."
LARGEST = 2**53
"""Largest whole number that is exact in a float."""


class Fields:
    """The fields of a ``config.json``.

    Defaults are those of transformers for missing fields.

    Args:
        values: of the file.
        path: of the file, for messages.
        tensors: shapes of the checkpoint's tensors by name, for what the fields do not specify;
            empty: unknown.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        tensors: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.values, self.path, self.tensors = values, path, tensors or {}

    @classmethod
    def read(cls, folder: Path) -> Fields:
        """The configuration of a checkpoint folder.

        Raises:
            CheckpointError: if it is missing or not a JSON object.
        """
        path = folder / "config.json"
        values = read_json(path)
        if not isinstance(values, dict):
            raise CheckpointError(
                str(path),
                expected="a JSON object",
                got=type(values).__name__,
                remedy="Name a folder written by transformers' save_pretrained.",
            )
        return cls(values, path)

    def count(self, name: str, default: int | None = REQUIRED) -> int:
        """A whole number of at least 1; for layers and heads, limited by the size of the weights.

        Shapes are compared with the weights only after the model is created on the meta device,
        which takes long for many layers and heads.
        """
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise self.wrong(name, "a whole number of 1 or more", value)
        self._require_room(name, value)
        return value

    def counts(self, name: str) -> list[int]:
        """A list of whole numbers of at least 1."""
        values = self.get(name)
        if not isinstance(values, list) or not values:
            raise self.wrong(name, "a list of whole numbers of 1 or more", values)
        for value in values:
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise self.wrong(name, "a list of whole numbers of 1 or more", values)
        self._require_room(name, sum(values))
        return values

    def _require_room(self, name: str, value: int) -> None:
        most = LARGEST
        if self.tensors and ("layer" in name or name == "depths"):
            most = len(self.tensors)
        elif self.tensors and "head" in name:
            most = sum(map(math.prod, self.tensors.values()))
        if value > most:
            raise self.wrong(name, f"at most {most}, for weights of this size", value)

    def optional_count(self, name: str) -> int | None:
        """A whole number of at least 1, or None if null or missing."""
        return None if self.values.get(name) is None else self.count(name)

    def sides(self, name: str, default: int) -> tuple[int, int]:
        """Height and width, from a pair or a single number."""
        value = self.get(name, default)
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(type(side) is int and 0 < side <= LARGEST for side in pair):
            raise self.wrong(name, "one or two whole numbers of 1 or more", value)
        return pair[0], pair[1]

    def square(self, name: str, default: int) -> int:
        """Side of a square."""
        height, width = self.sides(name, default)
        if height != width:
            raise self.wrong(name, "a square", [height, width])
        return height

    def classes(self) -> int:
        """Number of labels; transformers omits them if there are two."""
        labels = self.get("id2label", {})
        if not isinstance(labels, dict):
            raise self.wrong("id2label", "an object", labels)
        return len(labels) or 2

    def number(self, name: str, default: float = REQUIRED) -> float:
        """A finite number."""
        value = self.get(name, default)
        if not _is_number(value):
            raise self.wrong(name, "a finite number", value)
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        value = self.get(name)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self.wrong(name, "a list of numbers", value)
        return [float(item) for item in value]

    def flag(self, name: str, default: bool = REQUIRED) -> bool:
        """True or False."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def choice(self, name: str, known: Mapping[str, Choice], default: str = REQUIRED) -> Choice:
        """The value of ``known`` for the field's name."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, " or ".join(map(repr, sorted(known))), repr(value))
        return known[value]

    def require(self, name: str, only: object) -> None:
        """Require the only supported value."""
        value = self.values.get(name, only)
        if value != only:
            raise self.wrong(name, f"{only!r}, the only supported value", value)

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Any value."""
        value = self.values.get(name, default)
        if value is REQUIRED:
            raise self.wrong(name, "a value", "none")
        return value

    def wrong(self, name: str, expected: str, got: object) -> CheckpointError:
        """An error about one field."""
        return CheckpointError(
            f"{name} in {self.path}",
            expected=expected,
            got=got,
            remedy="This model is not supported; nothing was loaded.",
        )


def _is_number(value: object) -> bool:
    """True for a finite number within the range of a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: if it is missing, unreadable, too large or not JSON.
    """
    return storage.read_json(
        path,
        expected="a JSON file of a transformers checkpoint",
        remedy="Name a folder written by save_pretrained, with config.json in it; nothing was "
        "loaded.",
    )


def read_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file beside ``config.json``; none where there is no file.

    Raises:
        CheckpointError: when it is no JSON object.
    """
    if not path.exists():
        return {}
    fields = storage.read_json(path, expected="a JSON object", remedy=SAVE_AGAIN)
    if not isinstance(fields, dict):
        raise CheckpointError(
            str(path), expected="a JSON object", got=type(fields).__name__, remedy=SAVE_AGAIN
        )
    return fields
