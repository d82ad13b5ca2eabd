"""Atomic writing and validated reading of JSON and safetensors files."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import reprlib
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from posenc.errors import ArgumentError, CheckpointError, OutputError, PosencError

MOST_JSON = 1 << 23
"""Largest JSON file or safetensors header in bytes (80,000 tensors; 180 MB when parsed)."""

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by name, from the header of a file."""

WRITTEN = "a complete file written by posenc"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""Relative paths that may be meant as a name on the Hugging Face Hub."""

RESTORE = "Restore the file from a copy, or run the command that wrote it again."


def as_path(value: Path | str, argument: str = "folder") -> Path:
    """``value`` as a path; ArgumentError, naming ``argument``, where it is none."""
    try:
        return Path(value)
    except TypeError:
        raise ArgumentError(
            argument, expected="a path", got=reprlib.repr(value), remedy="Pass a string or a Path."
        ) from None


def make_folder(path: Path) -> None:
    """Create a folder and its parents; OutputError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def temporary_beside(path: Path) -> Path:
    """A path beside ``path`` that no other process, on any machine, uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; OutputError if it fails, with the old file unchanged."""
    temporary = temporary_beside(path)
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
        raise unwritable(path, error) from error


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_bytes(path: Path | str, *, most: int) -> bytes:
    """The content of a regular file or a link to one, of at most ``most`` bytes.

    Raises:
        OSError: if it is missing, unreadable, larger, or not a regular file (pipes, sockets and
            devices are not opened for reading).
    """
    with os.fdopen(_opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # files in /proc report size 0
        content = b"" if size > most else file.read(most + 1)
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: for invalid JSON (NaN and infinity are), too deep nesting, unpaired surrogates
            and numbers beyond float64.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        value = json.loads(text, parse_constant=_not_json, parse_float=_finite)
        if SURROGATE.search(text):  # an unpaired surrogate cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    return value


SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]}, which is too large a number")
    return value


def read_json(path: Path, *, expected: str = WRITTEN, remedy: str = RESTORE) -> Any:
    """The value in a JSON file.

    Args:
        expected, remedy: for the message; a file that is missing has a remedy of its own.

    Raises:
        CheckpointError: if it is missing, unreadable, not a regular file, too large or not JSON.
    """
    try:
        return parse_json(read_bytes(path, most=MOST_JSON))
    except OSError as error:
        raise _unread(path, error, expected, remedy) from error
    except ValueError as error:
        raise _damaged(path, f"invalid JSON ({error})", expected, remedy) from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, object]) -> None:
    """Write tensors and JSON metadata to a safetensors file with a checksum."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(meta, sort_keys=True)
    header = {"meta": text, "sha256": _digest(plain, text)}
    write_bytes(path, save(plain, metadata=header))


def open_tensors(path: Path, *, expected: str = WRITTEN, remedy: str = RESTORE) -> Any:
    """A safetensors file, opened by ``safetensors.safe_open``: a context manager.

    Args:
        expected, remedy: for the message.

    Raises:
        CheckpointError: if it is missing, not a regular file or damaged, or its header too large.
    """
    try:
        with os.fdopen(_opened(path), "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > MOST_JSON:
            raise OSError(errno.EFBIG, f"a header of {header:,} bytes", str(path))
        return safe_open(path, framework="pt")
    except OSError as error:
        raise _unread(path, error, expected, remedy) from error
    except Exception as error:  # the library raises errors of several kinds
        raise _damaged(path, str(error), expected, remedy) from error


def load_tensors(
    path: Path,
    *,
    fits: Callable[[Shapes, dict[str, Any]], None] = lambda shapes, meta: None,
    remedy: str = RESTORE,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and metadata written by ``save_tensors``, without executing code.

    Args:
        path: the file.
        fits: called with shapes and metadata before any tensor is read; its errors propagate.
        remedy: for the message about a damaged file.

    Raises:
        CheckpointError: if the file is damaged or of another kind.
    """
    try:
        with open_tensors(path, remedy=remedy) as file:
            header = file.metadata() or {}
            meta = parse_json(header["meta"])
            if not isinstance(meta, dict):
                raise ValueError("no metadata")
            names = sorted(file.keys())
            fits({name: tuple(file.get_slice(name).get_shape()) for name in names}, meta)
            tensors = {name: file.get_tensor(name) for name in names}
        intact = header.get("sha256") == _digest(tensors, header["meta"])
    except PosencError:
        raise
    except Exception as error:  # the library raises errors of several kinds
        raise _damaged(path, str(error), WRITTEN, remedy) from error
    if not intact:
        raise _damaged(path, "a checksum mismatch", WRITTEN, remedy)
    return tensors, meta


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Flush a rename to disk, on POSIX systems."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _opened(path: Path | str) -> int:
    """A file descriptor of a regular file; OSError for any other."""
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_BINARY", "O_CLOEXEC", "O_NOCTTY"):
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"an invalid file name ({error})", repr(path)) from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"
        raise OSError(errno.EINVAL, f"{kind}, not a file", str(path))
    return handle


def unwritable(path: Path, error: OSError, argument: str = "out") -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free some space and run it again; files written before are intact."
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = "Choose a folder you may write to."
    else:
        remedy = "Choose another folder."
    reason = error.strerror or str(error)
    return OutputError(argument, expected=f"to write {path}", got=reason, remedy=remedy)


def _unread(path: Path, error: OSError, expected: str, remedy: str) -> CheckpointError:
    """The error about a file that cannot be opened, with a remedy that fits the cause."""
    got = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        got, remedy = _missing(path)
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "Give yourself the permission to read it."
    elif error.errno in (errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG):
        remedy = "Check the path."
    return _damaged(path, got, expected, remedy)


def _missing(path: Path) -> tuple[str, str]:
    """Description of a path that leads to no file, and a remedy: another path, if one is near."""
    folder = path.parent
    if path.is_symlink():
        return "a link to a file that is gone", "Download or write the folder again."
    if folder.is_file():
        return f"{folder}, which is a file", "Name the folder that it lies in."
    if folder.is_dir():
        below = sorted([*folder.glob(f"*/{path.name}"), *folder.glob(f"*/*/{path.name}")])
        hint = f"Did you mean {below[0].parent}?" if below else "Name the folder that has one."
        return f"no {path.name} in {folder}", hint
    parent = next(parent for parent in folder.parents if parent.is_dir())
    part = folder.relative_to(parent).parts[0]
    names: list[str] = []
    with suppress(OSError):  # it may not be read
        names = [entry.name for entry in parent.iterdir()]
    near = get_close_matches(part, names, n=1)
    where = "this folder" if parent == Path() else parent
    hint = (
        f"Did you mean {parent / near[0]}?" if near else f"Check the path: {where} has no {part}."
    )
    if HUB_NAME.fullmatch(str(folder)):
        download = f"hf download {folder} --local-dir FOLDER"
        hint += f" A name on the Hugging Face Hub is no folder; {download} makes one."
    return f"no folder {folder}", hint


def _damaged(path: Path, got: str, expected: str, remedy: str) -> CheckpointError:
    return CheckpointError(str(path), expected=expected, got=got, remedy=remedy)
