"""Files in the user's cache folder, taken only where no other user can have written them.

POSIX alone: folders are opened once, checked by their descriptors, and files opened in them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")

REMEDY = "remove it, or set XDG_CACHE_HOME to a folder of your own"

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# A named pipe would block, a terminal become the process's own.
_FILE = _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)

DAMAGED = (OSError, ValueError, TypeError, EOFError, zlib.error)
"""Errors of reading a file that is missing, truncated, or of another format."""


def kept(
    kind: str,
    name: str,
    make: Callable[[], Made],
    *,
    read: Callable[[bytes], Made],
    write: Callable[[Made], bytes],
) -> Made:
    """The content of a file of a ``cache_folder``; made and kept where no process made it before.

    Where no file can be kept, it is made each time.

    Args:
        kind, name: of the folder and its file.
        make: called where the file is missing or damaged.
        read, write: from and to the content of the file; ``read`` may raise ``DAMAGED``.
    """
    if os.name != "posix":
        return make()
    with suppress(*DAMAGED):
        path = cache_folder(kind) / name
        with opened_folder(path.parent) as folder:
            return read(read_file(path, folder))
    made = make()
    with suppress(OSError):
        path = cache_folder(kind) / name
        with opened_folder(path.parent, create=True) as folder:
            write_file(path, folder, write(made))
    return made


def cache_folder(kind: str) -> Path:
    """The folder of posenc's files of one kind, made or not.

    A relative ``XDG_CACHE_HOME`` is ignored, as its specification says.

    Raises:
        OSError: where there is no home folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            base = Path()
    if not base.is_absolute():
        raise OSError("no home folder; set XDG_CACHE_HOME to a folder of your own")
    return base / "posenc" / kind


@contextmanager
def opened_folder(folder: Path, *, create: bool = False) -> Iterator[int]:
    """The descriptor of a ``cache_folder``.

    Args:
        folder: it and its parent are not links, and this user's or root's; in theirs, others cannot
            put another in its place.
        create: make it, its parents too; folders that are there are closed to others.

    Raises:
        OSError: where it is not, another user's, or writable by others.
    """
    base = folder.parents[1]
    if create:
        for level in (*reversed(base.parents), base):
            level.mkdir(mode=0o700, exist_ok=True)
    at, path = os.open(base, _FOLDER | getattr(os, "O_CLOEXEC", 0)), base
    try:
        mode = os.fstat(at).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OSError(f"other users may write {path}; {REMEDY}")
        for name in folder.parts[-2:]:
            path /= name
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=at)
            inner = _open(path, _FOLDER | _NO_LINK, at)
            os.close(at)
            at = inner
            if create and os.fstat(at).st_uid == os.geteuid():
                os.fchmod(at, 0o700)
            _require_own(path, os.fstat(at))
        yield at
    finally:
        os.close(at)


def open_file(path: Path, folder: int, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file in an ``opened_folder``.

    Raises:
        OSError: where it is not, a link, another user's, or writable by others.
    """
    handle = _open(path, flags | _FILE, folder)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file; {REMEDY}")
        _require_own(path, status)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_file(path: Path, folder: int) -> bytes:
    """The content of a file in an ``opened_folder``; raises as ``open_file``."""
    with os.fdopen(open_file(path, folder), "rb") as file:
        return file.read()


def write_file(path: Path, folder: int, content: bytes) -> None:
    """Put a file in an ``opened_folder``, whole and on the disk, in place of what is there."""
    part = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(part, dir_fd=folder)
        raise
    os.fsync(folder)


def _open(path: Path, flags: int, folder: int) -> int:
    try:
        return os.open(path.name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a link; {REMEDY}") from error
        if error.errno == errno.ENOTDIR:
            raise OSError(f"{path} is a link or no folder; {REMEDY}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise OSError(f"{path} belongs to another user ({status.st_uid}); {REMEDY}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"other users may write {path}; {REMEDY}")
