"""Files that are whole or absent, and that say so when they are damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from posenc.errors import CheckpointError, OutputError

__all__ = ["load_tensors", "make_folder", "read_json", "save_tensors", "write_bytes", "write_json"]


def make_folder(path: Path) -> None:
    """Make a folder and those above it.

    Raises:
        OutputError: when that is impossible.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that at any moment there is the old one or the new one, whole.

    Raises:
        OutputError: when the disk is full or the folder cannot be written to; the old file, if
            any, is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, as ``write_bytes`` does."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: when it is missing, unreadable or no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _damaged(path, f"no JSON ({error})") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, object]) -> None:
    """Write tensors and JSON values to one safetensors file, with a checksum of both.

    Raises:
        OutputError: as ``write_bytes``.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(meta, sort_keys=True)
    header = {"meta": text, "sha256": _digest(plain, text)}
    write_bytes(path, save(plain, metadata=header))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``save_tensors`` wrote. Nothing in the file is executed.

    Raises:
        CheckpointError: when it is damaged or not such a file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    if "meta" not in header or header.get("sha256") != _digest(tensors, header["meta"]):
        raise _damaged(path, "a checksum that does not fit")
    meta: dict[str, Any] = json.loads(header["meta"])
    return tensors, meta


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Let the renaming survive a power cut, on systems where folders can be synced."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free some space, then continue with --resume: nothing finished is lost."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = "Choose a folder you may write to (--out)."
    else:
        remedy = "Choose another folder (--out)."
    reason = error.strerror or str(error)
    return OutputError("out", expected=f"to write {path}", got=reason, remedy=remedy)


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        str(path),
        expected="a whole file written by posenc",
        got=got,
        remedy="Delete it and continue with --resume: what it held is made again.",
    )
