"""The shipped text, and texts of the user's."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from posenc.errors import DataError
from posenc.experiments import corpus
from posenc.experiments.corpus import TextCorpus, read_corpus, read_text, shipped_text


@pytest.fixture(scope="module")
def shipped() -> TextCorpus:
    return shipped_text()


def test_shipped_text_is_large_with_a_tenth_held_out(shipped: TextCorpus) -> None:
    total = len(shipped.train) + len(shipped.held_out)
    assert total == 3_151_597
    assert 0.05 < len(shipped.held_out) / total < 0.15
    assert b"import torch" in shipped.train
    assert b"def __init__(self" in shipped.held_out
    assert b"\r" not in shipped.train + shipped.held_out
    assert "578 files, 2.8 MB to train on, 357.9 kB held out" in shipped.describe()


def test_shipped_text_is_pinned_by_its_checksum_here(shipped: TextCorpus) -> None:
    """Of the bytes, counted here, so that neither the text nor the constant changes unnoticed."""
    digest = hashlib.sha256()
    for part in (shipped.train, shipped.held_out):
        digest.update(len(part).to_bytes(8, "big") + part)
    assert digest.hexdigest() == (
        "05500652d0c645721f5ef3b1a3f444adc4ff4eb43f852bb2d83a7a68f1a4ca99"
    )
    assert shipped.sha256 == digest.hexdigest()
    assert read_corpus(None) == shipped


def test_shipped_text_does_not_depend_on_the_interpreter(
    shipped: TextCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": "/nowhere"})
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert shipped_text() == shipped


def test_another_text_in_its_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "source.zip"
    monkeypatch.setattr(corpus, "SHIPPED", other)
    with pytest.raises(DataError, match=r"No such file.*Install posenc again"):
        shipped_text()
    other.write_bytes(b"PK damaged")
    with pytest.raises(DataError, match="not a zip file"):
        shipped_text()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("train.txt", "import antigravity")
    with pytest.raises(DataError, match=r"held_out\.txt"):
        shipped_text()
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("held_out.txt", "import this")
    with pytest.raises(DataError, match="got the SHA-256"):
        shipped_text()


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
    assert TextCorpus.of("x", b"ab", b"c", 1).sha256 != TextCorpus.of("x", b"a", b"bc", 1).sha256


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

    def deny(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", deny)
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
