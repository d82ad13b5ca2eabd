"""The embedded corpus, and texts of the user's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from posenc.errors import DataError
from posenc.lab import corpus
from posenc.lab.corpus import Corpus, read_corpus, read_text, standard_library


@pytest.fixture(scope="module")
def embedded() -> Corpus:
    return standard_library()


def test_embedded_corpus_is_large_text_with_a_tenth_held_out(embedded: Corpus) -> None:
    total = len(embedded.train) + len(embedded.held_out)
    assert 3e6 < total < 12e6
    assert 0.05 < len(embedded.held_out) / total < 0.15
    assert b"import os" in embedded.train
    assert b"def __init__(self" in embedded.held_out
    assert str(embedded.files) in embedded.describe()


def test_embedded_corpus_is_the_same_every_time(embedded: Corpus) -> None:
    assert read_corpus(None) == embedded


def library(root: Path, extra: dict[str, bytes]) -> Path:
    """A folder that looks like a standard library."""
    names = sorted(sys.stdlib_module_names - corpus.LEFT_OUT)[:60]
    files = {f"{name}.py": f"# {name}\r\nx = 1\n".encode() for name in names} | extra
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_embedded_corpus_leaves_out_what_other_machines_may_lack(tmp_path: Path) -> None:
    left_out = {
        "idlelib/editor.py": b"IDLE",
        "json/tests/test_json.py": b"TEST",
        "test/test_os.py": b"TEST",
        "site-packages/numpy.py": b"PACKAGE",
        "_sysconfigdata_x86.py": b"BUILD",
        "json/data.txt": b"DATA",
    }
    plain = standard_library(library(tmp_path / "plain", {}))
    crowded = standard_library(library(tmp_path / "crowded", left_out))
    assert crowded == plain


def test_embedded_corpus_has_one_kind_of_line_end(tmp_path: Path) -> None:
    found = standard_library(library(tmp_path, {}))
    assert b"\r" not in found.train + found.held_out


def test_embedded_corpus_holds_out_whole_files(tmp_path: Path) -> None:
    found = standard_library(library(tmp_path, {}))
    train, held_out = (
        {line for line in part.splitlines() if line.startswith(b"# ")}
        for part in (found.train, found.held_out)
    )
    assert train
    assert held_out
    assert not train & held_out
    assert len(train) + len(held_out) == found.files == 60


def test_interpreter_without_source_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.py files.*--text"):
        standard_library(tmp_path)


def test_last_tenth_of_a_file_is_held_out(tmp_path: Path) -> None:
    text = bytes(range(256)) * 40
    (tmp_path / "a.bin").write_bytes(text)
    found = read_text(tmp_path / "a.bin")
    assert found.train + found.held_out == text
    assert len(found.held_out) == len(text) // 10
    assert found.files == 1


def test_bytes_need_no_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve café".encode("latin-1") * 100)
    assert b"\xef" in read_text(tmp_path / "latin.txt").train


def test_whole_files_of_a_folder_are_held_out(tmp_path: Path) -> None:
    for number in range(40):
        folder = tmp_path / f"part-{number % 4}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_bytes(b"%02d" % number * 50)
    found = read_text(tmp_path)
    assert found.files == 40
    assert 0.05 < len(found.held_out) / 4000 < 0.2
    train = {found.train[i : i + 2] for i in range(0, len(found.train), 2)}
    held_out = {found.held_out[i : i + 2] for i in range(0, len(found.held_out), 2)}
    assert not train & held_out
    assert len(train | held_out) == 40


def test_folder_of_one_large_file_is_cut_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_bytes(b"a" * 10_000)
    (tmp_path / "small.txt").write_bytes(b"b" * 10)
    found = read_text(tmp_path)
    assert len(found.held_out) == 1001


def test_hidden_files_are_no_text(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"HIDDEN" * 100)
    (tmp_path / "a.txt").write_bytes(b"seen" * 100)
    found = read_text(tmp_path)
    assert b"HIDDEN" not in found.train + found.held_out
    assert found.files == 1


def test_hash_tells_where_the_cut_is() -> None:
    assert Corpus.of("x", b"ab", b"c", 1).sha256 != Corpus.of("x", b"a", b"bc", 1).sha256


def test_missing_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing there"):
        read_text(tmp_path / "absent.txt")


def test_empty_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="an empty file"):
        read_text(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="a folder without text"):
        read_text(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are a thing of Unix")
def test_pipe_is_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a device, pipe or socket"):
        read_text(tmp_path / "pipe")


def test_unreadable_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_bytes(b"x" * 100)

    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(DataError, match=r"Permission denied .*secret\.txt.*permissions"):
        read_text(tmp_path)


def test_dangling_link_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    (tmp_path / "broken.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(DataError, match=r"broken\.txt"):
        read_text(tmp_path)


def test_text_larger_than_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 2000)
    monkeypatch.setattr(corpus, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match=r"2\.0 kB"):
        read_text(tmp_path / "a.txt")
