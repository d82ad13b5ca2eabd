"""What a transformers ``config.json`` says, with a reason for everything that does not fit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from posenc.errors import CheckpointError

__all__ = ["Fields", "read_json"]

Choice = TypeVar("Choice")
REQUIRED: Any = object()


class Fields:
    """The fields of a ``config.json``.

    A default is the one that transformers has for a field that the file leaves out.

    Args:
        values: what the file holds.
        path: where it is, for messages.
        tensors: names of the checkpoint's tensors, where they say what the fields do not.
    """

    def __init__(
        self, values: Mapping[str, Any], path: Path, tensors: Collection[str] = ()
    ) -> None:
        self.values, self.path, self.tensors = values, path, tensors

    @classmethod
    def read(cls, folder: Path) -> Fields:
        """The configuration of a checkpoint folder.

        Raises:
            CheckpointError: when there is none, or it is no JSON object.
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
        """A whole number of 1 or more."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a whole number of 1 or more", value)
        return value

    def optional_count(self, name: str) -> int | None:
        """The same, or None where it is null or left out."""
        return None if self.values.get(name) is None else self.count(name)

    def sides(self, name: str, default: int) -> tuple[int, int]:
        """Height and width, from a pair or from one number for both."""
        value = self.get(name, default)
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
            raise self.wrong(name, "one or two whole numbers of 1 or more", value)
        return pair[0], pair[1]

    def square(self, name: str, default: int) -> int:
        """The side of a square."""
        height, width = self.sides(name, default)
        if height != width:
            raise self.wrong(name, "a square", [height, width])
        return height

    def classes(self) -> int:
        """Labels of a classifier; transformers leaves them out where there are two."""
        labels = self.get("id2label", {})
        if not isinstance(labels, dict):
            raise self.wrong("id2label", "an object", labels)
        return len(labels) or 2

    def number(self, name: str, default: float = REQUIRED) -> float:
        """A finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number", value)
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        value = self.get(name)
        if not isinstance(value, list) or not all(
            isinstance(each, int | float) and not isinstance(each, bool) for each in value
        ):
            raise self.wrong(name, "a list of numbers", value)
        return [float(each) for each in value]

    def flag(self, name: str, default: bool = REQUIRED) -> bool:
        """True or False."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def choice(self, name: str, known: Mapping[str, Choice], default: str = REQUIRED) -> Choice:
        """What ``known`` has for the field's text."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, " or ".join(map(repr, sorted(known))), repr(value))
        return known[value]

    def require(self, name: str, only: object) -> None:
        """Refuse another value than the one that our model can be."""
        value = self.values.get(name, only)
        if value != only:
            raise self.wrong(name, f"{only!r}, the only one that is supported", value)

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
            remedy="This model cannot be read; nothing was loaded.",
        )


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: when it is missing, unreadable or no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            str(path),
            expected="a file of a transformers checkpoint",
            got=error.strerror or error,
            remedy="Name a folder written by save_pretrained, with config.json in it.",
        ) from error
    except ValueError as error:
        raise CheckpointError(
            str(path), expected="JSON", got=error, remedy="Fetch or write the checkpoint again."
        ) from error
