"""Text files of the user: read whole, or refused with the line that is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posenc.errors import DataError
from posenc.lab.experiments.corpus import MOST_BYTES, unusable
from posenc.storage import read_bytes


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sentences and their translations.

    Args:
        name: where they come from, in a phrase.
        pairs: (source, target), as they stand in the text but for blanks at the ends.
        skipped: lines left out because one side was empty.
        sha256: of all pairs.
    """

    name: str
    pairs: Sequence[tuple[str, str]]
    skipped: int
    sha256: str


def read_parallel(text: Path, target: Path | None = None, *, skip_empty: bool = False) -> Parallel:
    """The pairs of a TSV file (source, tab, target), or of two files, line by line.

    Args:
        text: the TSV, or the source's file.
        target: the target's file.
        skip_empty: leave out pairs of which a side is empty, instead of refusing the text.

    Raises:
        DataError: on a file that is missing, unreadable, empty or not in UTF-8, on unequal numbers
            of lines, lines without exactly one tab, and empty lines; it names the first.
    """
    text = Path(text)
    if target is None:
        pairs = [(source, other) for source, other in read_columns(text, 2, skip=skip_empty)]
        name = text.name
    else:
        target = Path(target)
        sources, targets = read_lines(text), read_lines(target, "target")
        require_equal(sources, targets, str(text), str(target), "target")
        pairs = list(zip(sources, targets, strict=True))
        name = f"{text.name} and {target.name}"
    stripped = [(source.strip(), other.strip()) for source, other in pairs]
    for number, (source, other) in enumerate(stripped, start=1):
        if not ((source and other) or skip_empty):
            empty = text if target is None or not source else target
            raise DataError(
                "text",
                expected="a sentence and its translation in every line",
                got=f"line {number} of {empty}, of which nothing is left without blanks",
                remedy="Remove the line from both sides.",
            )
    complete = [pair for pair in stripped if all(pair)]
    if not complete:
        raise unusable(text, "no pairs", "Give sentences and their translations.")
    digest = hashlib.sha256()
    for source, other in complete:
        digest.update(f"{source}\t{other}\n".encode())
    return Parallel(
        name=name, pairs=complete, skipped=len(pairs) - len(complete), sha256=digest.hexdigest()
    )


def require_equal(
    lines: Sequence[str], others: Sequence[str], first: str, second: str, argument: str
) -> None:
    """Refuse two texts that have not equally many lines.

    Raises:
        DataError: with both numbers.
    """
    if len(lines) != len(others):
        raise DataError(
            argument,
            expected=f"{len(lines):,} lines in {second}, as in {first}",
            got=f"{len(others):,}",
            remedy="Line N of one must translate line N of the other.",
        )


def read_columns(path: Path, count: int, *, skip: bool = False) -> list[tuple[str, ...]]:
    """The cells of a file with tabs between them.

    Args:
        path: the file.
        count: cells a line.
        skip: leave out empty lines.

    Raises:
        DataError: on a line with more cells or fewer; as ``read_lines``.
    """
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = tuple(line.split("\t"))
        if skip and not line.strip(" "):
            continue
        if len(cells) != count:
            got = "an empty line" if not line.strip() else f"{len(cells) - 1}"
            raise DataError(
                "text",
                expected=f"{count - 1} tab in every line of {path}",
                got=f"{got} in line {number}",
                remedy="Put one between the cells, and none within them.",
            )
        rows.append(cells)
    return rows


def read_lines(path: Path, argument: str = "text") -> list[str]:
    r"""The lines of a file in UTF-8, ended by ``\n`` or ``\r\n`` and by nothing else.

    Raises:
        DataError: when it is missing, unreadable, empty, too large, or not in UTF-8.
    """
    path = Path(path)
    try:
        content = read_bytes(path, most=MOST_BYTES)
    except OSError as error:
        remedy = f"Give a text file of at most {MOST_BYTES:,} bytes that you may read."
        if isinstance(error, FileNotFoundError):
            remedy = "Check the path for a typing error."
        raise unusable(path, error.strerror or str(error), remedy, argument) from error
    if not content.strip():
        raise unusable(path, "an empty file", "Give some text.", argument)
    return decoded(content, path, argument)


def decoded(content: bytes, path: Path | str, argument: str = "text") -> list[str]:
    """The lines of a text in UTF-8.

    Raises:
        DataError: when it is not; it names the byte and the line.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            argument,
            expected=f"{path} in UTF-8",
            got=f"byte 0x{content[error.start]:02X} in line {line}",
            remedy="Convert it: iconv -f LATIN1 -t UTF-8 FILE, if that is what it is in.",
        ) from error
    # Not splitlines(), to which a form feed or a Unicode separator within a sentence ends a line.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines
