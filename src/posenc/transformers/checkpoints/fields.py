"""Validated reading of a transformers ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posenc import storage
from posenc.errors import CheckpointError

SAVE_AGAIN = "Save it again; nothing was loaded."


class Fields:
    """The fields of a ``config.json``, or of a file beside it.

    Args:
        values: of the file.
        path: of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

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

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        return float(self._valid(name, default, "a finite number", _is_number))

    def numbers(self, name: str) -> list[float]:
        """A list of numbers."""
        return [float(item) for item in self._valid(name, None, "a list of numbers", _are_numbers)]

    def flag(self, name: str) -> bool:
        """True or False."""
        return bool(self._valid(name, None, "true or false", lambda v: isinstance(v, bool)))

    def _valid(self, name: str, default: Any, expected: str, valid: Callable[[Any], bool]) -> Any:
        value = self.values.get(name, default)
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


def _is_number(value: object) -> bool:
    """True for a finite number within the range of a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


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
