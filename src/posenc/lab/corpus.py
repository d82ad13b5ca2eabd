"""Text to train and test on: the standard library's source, or a file or folder of the user's.

Text is bytes throughout, so no encoding can be wrong.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posenc.errors import DataError

__all__ = ["MOST_BYTES", "Corpus", "read_corpus", "read_text", "standard_library"]

HELD_OUT = 0.1
"""Share of the bytes that is kept for testing."""

MOST_BYTES = 1 << 30
"""A larger text would not fit beside a model in the memory of a small machine."""

LEFT_OUT = frozenset(
    {
        # Absent from some distributions of Python, or packaged apart.
        "distutils",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "tkinter",
        "turtledemo",
        "venv",
        # Tables rather than text.
        "encodings",
        "pydoc_data",
    }
)
"""Parts of the standard library that the embedded corpus leaves out."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text in two parts that share no file (or, of a single file, no byte).

    Args:
        name: what it is, in a phrase.
        train: bytes to train on.
        held_out: bytes to test on.
        files: how many files it was read from.
        sha256: of both parts, with their lengths.
    """

    name: str
    train: bytes
    held_out: bytes
    files: int
    sha256: str

    @classmethod
    def of(cls, name: str, train: bytes, held_out: bytes, files: int) -> Corpus:
        """The corpus of these bytes, hashed."""
        digest = hashlib.sha256()
        for part in (train, held_out):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return cls(
            name=name, train=train, held_out=held_out, files=files, sha256=digest.hexdigest()
        )

    def describe(self) -> str:
        """Name and sizes in a phrase."""
        train, held_out = _size(len(self.train)), _size(len(self.held_out))
        files = f"{self.files} file" + ("s" if self.files != 1 else "")
        return f"{self.name} ({files}, {train} to train on, {held_out} held out)"


def read_corpus(path: Path | None) -> Corpus:
    """The text at ``path``, or the standard library's source where there is none.

    Raises:
        DataError: as ``read_text`` and ``standard_library``.
    """
    return standard_library() if path is None else read_text(path)


def standard_library(root: Path | None = None) -> Corpus:
    """The source of the running interpreter's standard library, about 5 MB of real text.

    Only modules that every distribution of Python has, without their tests and with line ends
    made ``\\n``, so that machines with the same Python have the same text (``sha256`` tells). A
    tenth of the files, chosen by the hash of their names, is held out.

    Args:
        root: the library's folder; that of the running interpreter by default.

    Raises:
        DataError: when the interpreter comes without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    named = {path.relative_to(root).as_posix(): path for path in _modules(root)}
    if not named:
        raise DataError(
            "text",
            expected=f"the standard library's source in {root}",
            got="no .py files",
            remedy="Give a text of your own (--text FILE_OR_FOLDER).",
        )
    train, held_out = bytearray(), bytearray()
    for name in sorted(named):
        content = _read(named[name]).replace(b"\r\n", b"\n")
        part = held_out if _drawn(name) < HELD_OUT else train
        part += content
    version = ".".join(platform.python_version_tuple()[:3])
    return Corpus.of(
        f"source of Python {version}'s standard library", bytes(train), bytes(held_out), len(named)
    )


def read_text(path: Path) -> Corpus:
    """A text file, or all files below a folder (hidden ones left out), as bytes.

    Of a file the last tenth is held out; of a folder whole files are, chosen by the hash of their
    names, unless there are too few for that.

    Raises:
        DataError: when it is missing, unreadable, empty, too large, or no file or folder.
    """
    path = Path(path)
    try:
        if path.is_dir():
            names = sorted(_walk(path))
        elif path.is_file():
            names = [path]
        elif path.exists():
            raise _unusable(path, "a device, pipe or socket", "Save the text in a file first.")
        else:
            raise _unusable(path, "nothing there", "Check the path for a typing error.")
        total = sum(name.stat().st_size for name in names)
    except OSError as error:
        raise _unreadable(path, error) from error
    if total > MOST_BYTES:
        raise _unusable(path, f"{_size(total)}", f"Give at most {_size(MOST_BYTES)}.")
    contents = {
        name.relative_to(path).as_posix() if name != path else name.name: _read(name)
        for name in names
    }
    if not any(contents.values()):
        what = "an empty file" if path.is_file() else "a folder without text"
        raise _unusable(path, what, "Give a text of at least a few thousand bytes.")
    train, held_out = _split(contents)
    return Corpus.of(path.resolve().name, train, held_out, len(contents))


def _modules(root: Path) -> Iterator[Path]:
    """Files of the standard modules; what the machine's owner or build added is not named so."""
    for name in sys.stdlib_module_names - LEFT_OUT:
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        for path in (root / name).rglob("*.py"):
            if not {"test", "tests"} & set(path.relative_to(root).parts):
                yield path


def _drawn(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        elif entry.is_file() or entry.is_symlink():
            yield entry


def _split(contents: dict[str, bytes]) -> tuple[bytes, bytes]:
    """Whole files held out where that gives about a tenth of the bytes, else the last tenth."""
    total = sum(map(len, contents.values()))
    chosen: set[str] = set()
    size = 0
    for name in sorted(contents, key=_drawn):
        if size + len(contents[name]) <= 1.5 * HELD_OUT * total and size < HELD_OUT * total:
            chosen.add(name)
            size += len(contents[name])
    if size >= 0.5 * HELD_OUT * total:
        return (
            b"".join(text for name, text in contents.items() if name not in chosen),
            b"".join(text for name, text in contents.items() if name in chosen),
        )
    whole: Sequence[bytes] = tuple(contents.values())
    joined = b"".join(whole)
    end = len(joined) - max(1, round(HELD_OUT * len(joined)))
    return joined[:end], joined[end:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    where = error.filename or path
    return _unusable(path, f"{reason} ({where})", "Check the file's permissions, or leave it out.")


def _unusable(path: Path, got: str, remedy: str) -> DataError:
    return DataError("text", expected=f"readable text at {path}", got=got, remedy=remedy)


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
