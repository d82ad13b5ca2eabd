"""Folders on object stores, such as S3, by fsspec: worked on as local ones, and kept up to date."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath, PurePosixPath

from posenc.errors import CheckpointError, OutputError, PosencError

PAUSE = 10.0
"""Seconds between two looks for files to copy."""

BESIDE = ("", "-measured.json", "-search.json", "-subject", "-subject-training")
"""Ends of the names that a command writes to: its folder, and what it keeps beside it."""

NOTHING = "Nothing was done."

Stamp = tuple[int, int]
"""When a file was written, in nanoseconds, and its size."""


class StorePath(PurePosixPath):
    """A path on a store, whose text is a URL: ``s3://bucket/folder``."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}"


@contextmanager
def working_folder(out: PurePath) -> Iterator[Path]:
    """A local folder to work in: ``out`` itself, or for one on a store a copy of what it holds.

    Files are copied to the store while the block runs, and at its end, whatever ends it. They go
    one after the other in the order they were written, so what says that a run is finished comes
    after its model, and a program that is killed leaves a folder from which another one goes on.
    Nothing else may write to it meanwhile.

    Raises:
        OutputError: if the store's library is missing, or the store refuses or lacks the bucket.
    """
    if not isinstance(out, StorePath):
        yield Path(out)
        return
    home = Path(tempfile.mkdtemp(prefix="posenc-"))
    try:
        with _store_errors(out, NOTHING):
            mirror = _Mirror(out.parent, home)
            mirror.require_writable(out.name)
            mirror.fetch(*(f"{out.name}{end}" for end in BESIDE))
    except BaseException:
        shutil.rmtree(home)
        raise
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(PAUSE):
            with suppress(Exception):  # it is tried again
                mirror.put()

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        with _named(home, out.parent):
            yield home / out.name
    finally:
        ended.set()
        thread.join()
        with _store_errors(out, f"What it lacks is in {home}."):
            mirror.put()
        shutil.rmtree(home)


@contextmanager
def local_folder(folder: PurePath) -> Iterator[Path]:
    """The folder, or a local copy of one on a store, to be read.

    Raises:
        CheckpointError: if there is none.
        OutputError: as ``working_folder``.
    """
    if not isinstance(folder, StorePath):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="posenc-") as home:
        with _store_errors(folder, NOTHING):
            mirror = _Mirror(folder.parent, Path(home))
            mirror.fetch(folder.name)
        if not mirror.known:
            raise CheckpointError(
                str(folder), expected="a folder", got="nothing there", remedy="Check the path."
            )
        with _named(home, folder.parent):
            yield Path(home) / folder.name


class _Mirror:
    """Files and folders of a store, and their local copies.

    Args:
        store: the folder that they are in there.
        home: the local one.
    """

    def __init__(self, store: PurePath, home: Path) -> None:
        import fsspec

        options = {"auto_mkdir": True} if str(store).startswith("file:") else {}
        self.files, self.root = fsspec.core.url_to_fs(str(store), **options)
        self.home = home
        self.known: dict[str, Stamp] = {}
        """Files of the store, as they are here."""

    def require_writable(self, name: str) -> None:
        """Write a file, and delete it; the store's error if it refuses."""
        trial = f"{self.root}/.{name}.trial"
        self.files.pipe_file(trial, b"posenc")
        self.files.rm_file(trial)

    def fetch(self, *names: str) -> None:
        """Copy files and folders from the store."""
        self.files.invalidate_cache()
        for name in names:
            for found in self.files.find(f"{self.root}/{name}"):
                path = found.removeprefix(self.root).strip("/")
                local = self.home / path
                local.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(found, str(local))
                self.known[path] = _stamp(local)

    def put(self) -> None:
        """Copy what is new to the store, and delete there what is gone here.

        A file is deleted once something else took its place, which the second look sees.
        """
        gone = self.known.keys() - self._present().keys()
        for _ in range(2):
            new = self._present().items() - self.known.items()
            for path, stamp in sorted(new, key=lambda item: item[1]):
                try:
                    self.files.put_file(str(self.home / path), f"{self.root}/{path}")
                    self.known[path] = stamp
                except FileNotFoundError:
                    if (self.home / path).exists():
                        raise
        for path in gone - self._present().keys():
            self.files.rm_file(f"{self.root}/{path}")
            del self.known[path]

    def _present(self) -> dict[str, Stamp]:
        """Files that are complete, by path. Of a folder its files are looked at before what is
        in its folders, so those of a finished run are all there."""
        found = {}
        for folder, inner, names in os.walk(self.home):
            inner[:] = [name for name in inner if not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if not name.startswith("."):  # a lock, or a file that is being written
                    with suppress(FileNotFoundError):
                        found[path.relative_to(self.home).as_posix()] = _stamp(path)
        return found


@contextmanager
def _named(home: Path | str, store: PurePath) -> Iterator[None]:
    """Errors name files as they are called on the store."""
    try:
        yield
    except PosencError as error:
        for part in ("argument", "expected", "got", "remedy"):
            text = str(getattr(error, part))
            setattr(error, part, text.replace(str(home), str(store)))
        error.args = tuple(str(text).replace(str(home), str(store)) for text in error.args)
        raise


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@contextmanager
def _store_errors(url: StorePath, kept: str) -> Iterator[None]:
    """Errors of any store's library as an OutputError, which says what is ``kept``."""
    try:
        yield
    except ImportError as error:
        s3 = str(url).startswith("s3:")
        library = 'Run pip install "posenc[remote]".' if s3 else "Install it."
        raise OutputError(
            "store", expected=f"a library for {url}", got=error.msg, remedy=f"{library} {kept}"
        ) from error
    except Exception as error:  # each library has its own
        remedy = "Check the address and the connection."
        if isinstance(error, FileNotFoundError):
            remedy = "Make the bucket, or correct its name."
        elif isinstance(error, PermissionError) or "redential" in str(error):
            remedy = "Check the credentials (of S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        got = f"{type(error).__name__}: {error}"
        raise OutputError(
            "store", expected=f"access to {url}", got=got, remedy=f"{remedy} {kept}"
        ) from error
