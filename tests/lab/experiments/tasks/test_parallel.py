"""Reading text of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from posenc.errors import DataError
from posenc.lab.experiments.sequences import read_columns, read_lines, read_parallel


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_tsv_and_two_files_give_the_same(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", b"ein Haus\ta house\r\nzwei\ttwo\n")
    source = write(tmp_path / "a.de", b"ein Haus\nzwei\n")
    target = write(tmp_path / "a.en", b"a house\ntwo")
    one, other = read_parallel(tsv), read_parallel(source, target)
    assert one.pairs == other.pairs == [("ein Haus", "a house"), ("zwei", "two")]
    assert one.sha256 == other.sha256
    assert one.skipped == 0


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    text = "\ufeffone\u2028still one\x0c\x85one\r\ntwo\n"
    path = write(tmp_path / "a.txt", text.encode())
    assert read_lines(path) == ["one\u2028still one\x0c\x85one", "two"]


def test_unequal_line_counts(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", b"eins\nzwei\ndrei\n")
    target = write(tmp_path / "a.en", b"one\ntwo\n")
    with pytest.raises(DataError, match=r"target: expected 3 lines in .*a\.en.*a\.de, got 2"):
        read_parallel(source, target)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"eins\tone\nzwei\t \n", "line 2 of"),
        (b"eins\tone\n\ndrei\tthree\n", "an empty line in line 2"),
        (b"eins\tone\nzwei two\n", "expected 1 tab in every line of .*, got 0 in line 2"),
        (b"eins\tone\tuno\n", "got 2 in line 1"),
        (b"", "an empty file"),
        (b" \n\n", "an empty file"),
        ("eins\tone\nfünf\tfive\n".encode("latin-1"), "in UTF-8, got byte 0xFC in line 2"),
        ("eins\tone".encode("utf-16"), "byte 0xFF in line 1"),
    ],
)
def test_bad_tsv(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_parallel(write(tmp_path / "a.tsv", content))


def test_empty_line_of_two_files_names_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "a.de", b"eins\nzwei\n")
    target = write(tmp_path / "a.en", b"one\n\n")
    with pytest.raises(DataError, match=r"line 2 of .*a\.en"):
        read_parallel(source, target)


def test_empty_sides_can_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"eins\tone\n\t\n\n \ttwo\ndrei\tthree\n")
    text = read_parallel(path, skip_empty=True)
    assert text.pairs == [("eins", "one"), ("drei", "three")]
    assert text.skipped == 2  # a line without anything is no pair
    nothing = write(tmp_path / "b.tsv", b"\tone\n")
    with pytest.raises(DataError, match="no pairs"):
        read_parallel(nothing, skip_empty=True)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_lines(tmp_path / "none")
    with pytest.raises(DataError, match="a folder, not a file"):
        read_lines(tmp_path)


def test_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"1\tgood film\n0\tbad film\n")
    assert read_columns(path, 2) == [("1", "good film"), ("0", "bad film")]
