"""Validated reading of a transformers ``config.json``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from posenc import storage
from posenc.errors import CheckpointError

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
        if not path.exists():
            _refuse_other_kinds(folder)
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
        value: int = self._valid(name, default, "a whole number of 1 or more", _is_count)
        self._require_plausible(name, value)
        return value

    def counts(self, name: str) -> list[int]:
        """A list of whole numbers of at least 1."""
        values = self._list(name, "a list of whole numbers of 1 or more", _is_count)
        self._require_plausible(name, sum(values))
        return values

    def _require_plausible(self, name: str, value: int) -> None:
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
        if len(pair) != 2 or not all(map(_is_count, pair)):
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
        labels = self._valid("id2label", {}, "an object", lambda value: isinstance(value, dict))
        return len(labels) or 2

    def number(self, name: str, default: float = REQUIRED) -> float:
        """A finite number."""
        return float(self._valid(name, default, "a finite number", _is_number))

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        return [float(item) for item in self._list(name, "a list of numbers", _is_number)]

    def flag(self, name: str, default: bool = REQUIRED) -> bool:
        """True or False."""
        return bool(self._valid(name, default, "true or false", lambda v: isinstance(v, bool)))

    def choice(self, name: str, choices: Mapping[str, Choice], default: str = REQUIRED) -> Choice:
        """The value of ``choices`` for the field's name."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, " or ".join(map(repr, sorted(choices))), repr(value))
        return choices[value]

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

    def _list(self, name: str, expected: str, valid: Callable[[Any], bool]) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or not values or not all(map(valid, values)):
            raise self.wrong(name, expected, values)
        return values

    def _valid(self, name: str, default: Any, expected: str, valid: Callable[[Any], bool]) -> Any:
        value = self.get(name, default)
        if not valid(value):
            raise self.wrong(name, expected, value)
        return value

    def wrong(self, name: str, expected: str, got: object) -> CheckpointError:
        """An error about one field."""
        return CheckpointError(
            f"{name} in {self.path}",
            expected=expected,
            got=got,
            remedy="This model is not supported; nothing was loaded.",
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


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
        expected="a JSON file of a checkpoint",
        remedy="Download or write it again; nothing was loaded.",
    )


def _refuse_other_kinds(folder: Path) -> None:
    """Refuse adapters and GGUF files by name.

    Raises:
        CheckpointError: saying what to name instead.
    """
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_object(adapter).get("base_model_name_or_path")
        got = f"an adapter of {base or 'another model'}"
        remedy = "Name that model; or merge the adapter into it and save it whole: "
        remedy += "model.merge_and_unload().save_pretrained(FOLDER)"
    elif folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        got, remedy = "a GGUF file", "Name the folder that the file was converted from."
    else:
        return
    raise CheckpointError(
        str(folder), expected="a folder with the config.json of a model", got=got, remedy=remedy
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
