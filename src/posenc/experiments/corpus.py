"""Text to train and test on: the one that the package ships, or a file or folder of the user's.

Text is bytes throughout, so no encoding can be wrong.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from posenc.errors import DataError
from posenc.experiments.results import Corpus
from posenc.experiments.sequences import drawn
from posenc.storage import read_bytes

HELD_OUT = 0.1
"""Share of the bytes that is kept for testing."""

MOST_BYTES = 1 << 30
"""A larger text would not fit beside a model in the memory of a small machine."""

SHIPPED = Path(__file__).with_name("data") / "source.zip"
"""``train.txt`` and ``held_out.txt``: posenc's own source, tests and documentation at one commit,
files one after another, a tenth of them (by the hash of their names) held out."""

SHIPPED_FILES = 578
SHIPPED_SHA256 = "05500652d0c645721f5ef3b1a3f444adc4ff4eb43f852bb2d83a7a68f1a4ca99"
"""``TextCorpus.sha256`` of ``SHIPPED``; it never changes, so that results stay comparable."""


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
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
    def of(cls, name: str, train: bytes, held_out: bytes, files: int) -> TextCorpus:
        """The corpus of these bytes."""
        digest = hashlib.sha256()
        for part in (train, held_out):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return cls(
            name=name, train=train, held_out=held_out, files=files, sha256=digest.hexdigest()
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both parts as uint8."""
        return (
            torch.frombuffer(bytearray(self.train), dtype=torch.uint8),
            torch.frombuffer(bytearray(self.held_out), dtype=torch.uint8),
        )

    def record(self) -> Corpus:
        """Name, sizes and hash, for the results."""
        return Corpus(
            name=self.name,
            sha256=self.sha256,
            files=self.files,
            train_bytes=len(self.train),
            held_out_bytes=len(self.held_out),
        )

    def require_size(self, train: int, held_out: int, *, longest: int) -> None:
        """Refuse a text with fewer bytes than these, which tests at ``longest`` need.

        Raises:
            DataError: with both sizes.
        """
        if len(self.train) < train or len(self.held_out) < held_out:
            raise DataError(
                "text",
                expected=f"at least {train} bytes to train on and {held_out} held out, "
                f"to test at length {longest}",
                got=f"{len(self.train)} and {len(self.held_out)}",
                remedy="Give a longer text, or shorter test lengths.",
            )

    def describe(self) -> str:
        """Name and sizes in a phrase."""
        train, held_out = _size(len(self.train)), _size(len(self.held_out))
        files = f"{self.files} file" + ("s" if self.files != 1 else "")
        return f"{self.name} ({files}, {train} to train on, {held_out} held out)"


def read_corpus(path: Path | None) -> TextCorpus:
    """``read_text``, or ``shipped_text`` for None."""
    return shipped_text() if path is None else read_text(path)


def shipped_text() -> TextCorpus:
    """The text that the package ships, 3.2 MB of Python and Markdown, the same everywhere.

    Raises:
        DataError: when it is missing from the installation, or not what was shipped.
    """
    try:
        with zipfile.ZipFile(SHIPPED) as archive:
            train, held_out = archive.read("train.txt"), archive.read("held_out.txt")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise _not_as_shipped(error) from error
    name = "posenc's own source and documentation"
    corpus = TextCorpus.of(name, train, held_out, SHIPPED_FILES)
    if corpus.sha256 != SHIPPED_SHA256:
        raise _not_as_shipped(f"the SHA-256 {corpus.sha256}")
    return corpus


def read_text(path: Path) -> TextCorpus:
    """A text file, or all files below a folder (hidden ones left out), as bytes.

    Of a file the last tenth is held out; of a folder whole files are, chosen by the hash of their
    names, unless there are too few for that.

    Raises:
        DataError: when it is missing, unreadable, empty, too large, or no file or folder.
    """
    path = Path(path)
    try:
        if path.is_dir():
            files = sorted(_walk(path))
        elif path.is_file():
            files = [path]
        elif path.exists():
            raise _unusable(path, "a device, pipe or socket", "Save the text in a file first.")
        else:
            raise _unusable(path, "nothing there", "Check the path for a typing error.")
        total = sum(file.stat().st_size for file in files)
        if total > MOST_BYTES:
            raise _unusable(path, f"{_size(total)}", f"Give at most {_size(MOST_BYTES)}.")
        contents = {
            file.relative_to(path).as_posix() if file != path else file.name: read_bytes(
                file, most=MOST_BYTES
            )
            for file in files
        }
    except OSError as error:
        got = f"{error.strerror or error} ({error.filename or path})"
        raise _unusable(path, got, "Check the file's permissions, or leave it out.") from error
    if not any(contents.values()):
        got = "an empty file" if path.is_file() else "a folder without text"
        raise _unusable(path, got, "Give a text of at least a few thousand bytes.")
    train, held_out = _split(contents)
    return TextCorpus.of(path.resolve().name, train, held_out, len(contents))


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
    for name in sorted(contents, key=drawn):
        if size + len(contents[name]) <= 1.5 * HELD_OUT * total and size < HELD_OUT * total:
            chosen.add(name)
            size += len(contents[name])
    if size >= 0.5 * HELD_OUT * total:
        return (
            b"".join(text for name, text in contents.items() if name not in chosen),
            b"".join(text for name, text in contents.items() if name in chosen),
        )
    joined = b"".join(contents.values())
    end = len(joined) - max(1, round(HELD_OUT * len(joined)))
    return joined[:end], joined[end:]


def _unusable(path: Path, got: str, remedy: str) -> DataError:
    return DataError("text", expected=f"readable text at {path}", got=got, remedy=remedy)


def _not_as_shipped(got: object) -> DataError:
    return DataError(
        "text",
        expected=f"the text that posenc ships, {SHIPPED.name} of SHA-256 {SHIPPED_SHA256}",
        got=got,
        remedy="Install posenc again, or give a text of your own (--text FILE_OR_FOLDER).",
    )


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
