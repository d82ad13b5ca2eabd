"""Text to train and test on, shipped or the user's, and windows in its pieces.

Text is bytes throughout, so no encoding can be wrong.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from posenc.errors import DataError
from posenc.lab.experiments.results import Corpus
from posenc.lab.reporting.numbers import counted
from posenc.storage import read_bytes


@dataclass(frozen=True)
class Pieces:
    """Sizes of the pieces of a text that lie end to end in one tensor.

    A window lies in one piece. Only if all pieces are shorter than the window, it spans several.

    Args:
        sizes: of the pieces, in order.
    """

    sizes: tuple[int, ...]

    @classmethod
    def joined(cls, parts: Sequence[bytes]) -> tuple[UInt8[Tensor, " T"], Pieces]:
        """The bytes of all parts in a tensor, and its pieces."""
        joined = bytearray(b"".join(parts))
        text = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()
        return text, cls(tuple(map(len, parts)))

    def count(self, span: int) -> int:
        """Number of windows of ``span`` elements."""
        _, counts = self._begins_and_counts(span)
        return int(counts.sum())

    def begins(self, numbers: Int[Tensor, "..."], span: int) -> Int[Tensor, "..."]:
        """Begins of windows of ``span`` elements by their numbers, 0 to ``count(span) - 1``."""
        starts, counts = self._begins_and_counts(span)
        ends = counts.cumsum(0)
        piece = torch.searchsorted(ends, numbers, right=True)
        return numbers + (starts - ends + counts)[piece]

    def _begins_and_counts(self, span: int) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
        """Begins of the pieces, and the number of windows in each."""
        sizes = torch.tensor(self.sizes)
        if span > int(sizes.max()):
            sizes = sizes.sum(0, keepdim=True)
        return sizes.cumsum(0) - sizes, (sizes - span + 1).clamp(min=0)


HELD_OUT = 0.1
"""Share of the bytes that is kept for testing."""

FEWEST_BLOCKS, MOST_BLOCKS, BLOCK = 2, 16, 2048
"""Held-out blocks, and bytes that each has at least if there are more than the fewest."""

MOST_BYTES = 1 << 30
"""A larger text would not fit beside a model in the memory of a small machine."""

SHIPPED = Path(__file__).with_name("data") / "source.zip"
"""posenc's own source, tests and documentation at one commit, files one after another, in two
members that are read as one text."""

MEMBERS = ("train.txt", "held_out.txt")
SHIPPED_FILES = 578
SHIPPED_SHA256 = "500b181695c61d4b579255f42b8598dae0908eccaf315a2cdea12f4e442517e7"
"""``TextCorpus.sha256`` of ``SHIPPED``; pinned, so that results stay comparable."""


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """A text, of which interleaved blocks are held out.

    The text is cut into equal parts, and the middle tenth of each is held out, so that what is
    tested comes from everywhere in the text. No byte is in both, and windows lie within a block
    or between two (see ``Pieces``): none straddles a border. The blocks depend on the size of the
    text alone.

    Args:
        name: what it is, in a phrase.
        text: all of it.
        files: how many files it was read from.
    """

    name: str
    text: bytes
    files: int

    @property
    def train(self) -> tuple[bytes, ...]:
        """Pieces to train on: what lies between the blocks."""
        ends = [0, *(end for _, end in self._blocks())]
        begins = [*(begin for begin, _ in self._blocks()), len(self.text)]
        return tuple(self.text[a:b] for a, b in zip(ends, begins, strict=True))

    @property
    def held_out(self) -> tuple[bytes, ...]:
        """Blocks to test on."""
        return tuple(self.text[begin:end] for begin, end in self._blocks())

    @cached_property
    def sha256(self) -> str:
        """Hash of all pieces with their sizes."""
        digest = hashlib.sha256()
        for piece in (*self.train, *self.held_out):
            digest.update(len(piece).to_bytes(8, "big"))
            digest.update(piece)
        return digest.hexdigest()

    def _blocks(self) -> list[tuple[int, int]]:
        """Begin and end of each held-out block."""
        total = len(self.text)
        count = min(MOST_BLOCKS, max(FEWEST_BLOCKS, round(HELD_OUT * total) // BLOCK), total)
        parts = [total * index // count for index in range(count + 1)]
        sizes = [max(1, round(HELD_OUT * (end - begin))) for begin, end in pairwise(parts)]
        begins = [
            begin + (end - begin - size) // 2
            for (begin, end), size in zip(pairwise(parts), sizes, strict=True)
        ]
        return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]

    def record(self) -> Corpus:
        """Name, sizes and hash, for the results."""
        return Corpus(
            name=self.name,
            sha256=self.sha256,
            files=self.files,
            train_bytes=_length(self.train),
            held_out_bytes=_length(self.held_out),
        )

    def require_size(self, train: int, held_out: int, *, longest: int) -> None:
        """Refuse a text with fewer bytes than these, which tests at ``longest`` need.

        Raises:
            DataError: with both sizes.
        """
        sizes = _length(self.train), _length(self.held_out)
        if sizes[0] < train or sizes[1] < held_out:
            raise DataError(
                "text",
                expected=f"at least {train} bytes to train on and {held_out} held out, "
                f"to test at length {longest}",
                got=f"{sizes[0]} and {sizes[1]}",
                remedy="Give a longer text, or shorter test lengths.",
            )

    def describe(self) -> str:
        """Name and sizes in a phrase."""
        train, held_out = _size(_length(self.train)), _size(_length(self.held_out))
        blocks = f"{held_out} held out in {len(self.held_out)} blocks"
        return f"{self.name} ({counted(self.files, 'file')}, {train} to train on, {blocks})"


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
            text = b"".join(archive.read(name) for name in MEMBERS)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise _not_as_shipped(error) from error
    name = "posenc's own source and documentation"
    corpus = TextCorpus(name=name, text=text, files=SHIPPED_FILES)
    if corpus.sha256 != SHIPPED_SHA256:
        raise _not_as_shipped(f"the SHA-256 {corpus.sha256}")
    return corpus


def read_text(path: Path) -> TextCorpus:
    """A text file, or all files below a folder (hidden ones left out), as bytes.

    The files of a folder follow one another in the order of their paths.

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
            raise unusable(path, "a device, pipe or socket", "Save the text in a file first.")
        else:
            raise unusable(path, "nothing there", "Check the path for a typing error.")
        total = sum(file.stat().st_size for file in files)
        if total > MOST_BYTES:
            raise unusable(path, _size(total), f"Give at most {_size(MOST_BYTES)}.")
        contents = [read_bytes(file, most=MOST_BYTES) for file in files]
    except OSError as error:
        got = f"{error.strerror or error} ({error.filename or path})"
        raise unusable(path, got, "Check the file's permissions, or leave it out.") from error
    if not any(contents):
        got = "an empty file" if path.is_file() else "a folder without text"
        raise unusable(path, got, "Give a text of at least a few thousand bytes.")
    return TextCorpus(name=path.resolve().name, text=b"".join(contents), files=len(contents))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        elif entry.is_file() or entry.is_symlink():
            yield entry


def unusable(path: Path, got: str, remedy: str, argument: str = "text") -> DataError:
    """The error for a text that cannot be read."""
    return DataError(argument, expected=f"readable text at {path}", got=got, remedy=remedy)


def _not_as_shipped(got: object) -> DataError:
    return DataError(
        "text",
        expected=f"the text that posenc ships, {SHIPPED.name} of SHA-256 {SHIPPED_SHA256}",
        got=got,
        remedy="Install posenc again, or give a text of your own (--text FILE_OR_FOLDER).",
    )


def _length(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
