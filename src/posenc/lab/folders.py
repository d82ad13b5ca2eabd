"""Output folders that are complete or not there, and errors of Rust libraries."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posenc.errors import OutputError
from posenc.storage import make_folder, temporary_beside, unwritable


def require_unused(path: Path, argument: str = "out") -> None:
    """Require a new or empty folder that can be made, before any work for it.

    Raises:
        OutputError: naming ``argument``, for a file, a folder that is not empty, or one within
            something that is no folder or may not be written to.
    """
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
        around = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not used and not around.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{around}, which is a file")
        if not used and not os.access(around, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {around}")
    except OSError as error:
        raise unwritable(path, error, argument) from error
    if used:
        raise OutputError(
            argument,
            expected="a new or empty folder",
            got=f"{path}, which is in use",
            remedy="Choose another one; it was not touched.",
        )


@contextmanager
def output_folder(path: Path, argument: str = "out", *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that is renamed to ``path`` when the block ends without an error.

    After an error nothing is left of it, and the old content of ``path`` is untouched.

    Args:
        path: the final folder; its parents are made.
        argument: its name in messages.
        overwrite: replace an existing folder.

    Raises:
        OutputError: if ``path`` is in use and not to be replaced, or cannot be written.
    """
    if not overwrite:
        require_unused(path, argument)
    final = path.resolve()
    make_folder(final.parent)
    partial = temporary_beside(final)
    try:
        make_folder(partial)
        try:
            yield partial
        except OutputError as error:
            error.remedy = "Free some space or choose another folder; nothing was left behind."
            raise
        _rename(partial, final, argument)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, final: Path, argument: str) -> None:
    """Move a finished folder to its final path, in place of what is there."""
    old = partial.with_suffix(".old")
    try:
        while True:
            with suppress(FileNotFoundError):
                final.rename(old)
            try:
                partial.rename(final)
                break
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    shutil.rmtree(old, ignore_errors=True)
                    continue  # another process has just written its own
                if old.exists():
                    old.rename(final)
                raise
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(final, error, argument) from error


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Convert panics of Rust libraries, which are no ``Exception``, to ``RuntimeError``."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(str(error)) from error
