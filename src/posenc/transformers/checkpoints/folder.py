"""Validated reading of a checkpoint folder: ``config.json``, posenc's extensions in it, tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posenc import storage
from posenc.errors import CheckpointError
from posenc.storage import open_tensors

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


FIELD = "posenc_extension"
"""Field of ``config.json`` with method, factor, length and options, if transformers has none."""


def require_extension(fields: Fields) -> None:
    """Require method, factor, length and options of an extension.

    Raises:
        CheckpointError: for any other value.
    """
    extension = fields.values.get(FIELD)
    if (
        not isinstance(extension, Mapping)
        or set(extension) != {"method", "factor", "length", "options"}
        or not isinstance(extension["options"], Mapping)
    ):
        raise fields.wrong(FIELD, "method, factor, length and options", extension)


@contextmanager
def fitting(fields: Fields) -> Iterator[None]:
    """Turn errors of the extension of an arbitrary file into a ``CheckpointError``."""
    try:
        yield
    except Exception as error:
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


def stored_shapes(folder: Path) -> Shapes:
    """Shapes of all tensors by name, read without executing code.

    Raises:
        CheckpointError: if there are no safetensors, or a shard is missing, damaged or lacks a
            tensor of the index.
    """
    if (folder / INDEX).exists():
        return _of_shards(folder)
    if (folder / WHOLE).exists():
        return _of_file(folder / WHOLE)
    pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
    raise CheckpointError(
        str(folder),
        expected=f"{WHOLE}, or {INDEX} with its shards",
        got=f"{pickled[0]}, which is pickle" if pickled else "none",
        remedy="Save with save_pretrained of a recent transformers."
        if pickled
        else "Download or save the weights into the folder; nothing was loaded.",
    )


def _of_shards(folder: Path) -> Shapes:
    path = folder / INDEX
    index = read_json(path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(
        isinstance(file, str) and 0 < len(file.encode()) < 256 and Path(file).name == file
        for file in weights.values()
    ):
        raise CheckpointError(
            str(path),
            expected="a weight_map from tensors to files in this folder",
            got="another value",
            remedy="Download or write the checkpoint again.",
        )
    files = sorted(set(weights.values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise CheckpointError(
            str(folder),
            expected=f"all {len(files)} shards of {INDEX}",
            got=f"no {', '.join(missing)}",
            remedy="Download the missing shards; nothing was loaded.",
        )
    stored = {file: _of_file(folder / file) for file in files}
    for name, file in weights.items():
        if name not in stored[file]:
            raise CheckpointError(
                str(folder / file),
                expected=f"{name} according to {INDEX}",
                got="none",
                remedy="Download this shard again; nothing was loaded.",
            )
    return {name: stored[file][name] for name, file in weights.items()}


def _of_file(path: Path) -> Shapes:
    remedy = "Download or write it again; nothing was loaded."
    with open_tensors(path, expected="a complete safetensors file", remedy=remedy) as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
