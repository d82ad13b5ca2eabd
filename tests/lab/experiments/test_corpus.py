"""The shipped text, and texts of the user's."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import sysconfig
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch

from posenc.errors import DataError
from posenc.lab.experiments import corpus
from posenc.lab.experiments.corpus import Pieces, TextCorpus, read_corpus, read_text, shipped_text
from posenc.lab.experiments.text_loss import pair_entropy

PINNED = "500b181695c61d4b579255f42b8598dae0908eccaf315a2cdea12f4e442517e7"


@pytest.fixture(scope="module")
def shipped() -> TextCorpus:
    return shipped_text()


def test_shipped_text_is_large_with_a_tenth_held_out(
    shipped: TextCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the interpreter."""
    assert len(shipped.text) == 3_151_597
    assert len(shipped.held_out) == 16
    assert sum(map(len, shipped.held_out)) == pytest.approx(len(shipped.text) / 10, rel=1e-3)
    assert b"import torch" in shipped.train[0]
    assert b"def __init__(self" in b"".join(shipped.held_out)
    assert b"\r" not in shipped.text
    assert "578 files, 2.8 MB to train on, 315.2 kB held out in 16 blocks" in shipped.describe()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": "/nowhere"})
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert shipped_text() == shipped


def test_shipped_text_is_pinned_by_its_checksum_here(shipped: TextCorpus) -> None:
    """Of the bytes, counted here, so that neither the text nor the constant changes unnoticed."""
    digest = hashlib.sha256()
    for part in (*shipped.train, *shipped.held_out):
        digest.update(len(part).to_bytes(8, "big") + part)
    assert digest.hexdigest() == PINNED
    assert shipped.sha256 == digest.hexdigest()
    assert read_corpus(None) == shipped


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


@pytest.mark.parametrize("size", [1, 2, 3, 40, 10_240, 61_443, 1_000_003])
def test_interleaved_blocks_are_held_out(size: int) -> None:
    """Each byte is in one piece alone, in order; blocks come from every part of the text."""
    text = bytes((7 * i + i // 251) % 256 for i in range(size))
    found = TextCorpus(name="x", text=text, files=1)
    assert len(found.train) == len(found.held_out) + 1
    pieces = [*itertools.chain(*zip(found.train, found.held_out, strict=False)), found.train[-1]]
    assert b"".join(pieces) == text
    if size > 100:
        sizes = [len(block) for block in found.held_out]
        assert sum(sizes) == pytest.approx(size / 10, rel=0.01)
        assert max(sizes) - min(sizes) <= 1
        between = [len(piece) for piece in found.train]
        assert max(between[1:-1]) <= 1.01 * 2 * min(between), "no long stretch is left out"
    if len(found.held_out) > 2:
        assert min(map(len, found.held_out)) >= 2048


def test_held_out_text_is_like_the_rest_where_the_tail_is_not() -> None:
    """A text whose last tenth is in another script: byte pairs cost the same on both parts."""
    source = Random(0)
    words = [bytes(source.choices(b"abcdefgh ", k=500)) for _ in range(180)]
    tail = [bytes(source.choices(b"PQRSTUVW.", k=500)) for _ in range(20)]
    corpus = TextCorpus(name="x", text=b"".join(words + tail), files=1)
    train, _ = Pieces.joined(corpus.train)
    held_out, _ = Pieces.joined(corpus.held_out)
    own, other = (
        pair_entropy(train, part, torch.arange(1, len(part))) for part in (train, held_out)
    )
    assert other - own < 0.1
    split = 9 * len(corpus.text) // 10
    whole = torch.tensor(list(corpus.text), dtype=torch.uint8)
    last = torch.arange(split, len(whole))
    assert pair_entropy(whole[:split], whole, last) - own > 1


def test_files_of_a_folder_are_one_text(tmp_path: Path) -> None:
    """Bytes need no encoding, and hidden files are no text."""
    for number in range(40):
        folder = tmp_path / f"part-{number // 10}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02d}.txt").write_bytes(b"\xef%02d" % number * 50)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"HIDDEN" * 100)
    found = read_text(tmp_path)
    assert found.files == 40
    assert found.text == b"".join(b"\xef%02d" % number * 50 for number in range(40))


@pytest.mark.parametrize(
    ("kind", "read", "message"),
    [
        ("absent", "a.txt", "nothing there"),
        ("empty", "a.txt", "an empty file"),
        ("empty", "", "a folder without text"),
        ("pipe", "a.txt", "a device, pipe or socket"),
        ("link", "", r"a\.txt"),
        ("unreadable", "", r"Permission denied .*a\.txt.*permissions"),
        ("large", "a.txt", r"2\.0 kB"),
    ],
)
def test_text_that_cannot_be_read_is_named(
    kind: str, read: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    if kind == "empty":
        path.touch()
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("pipes with a name are a thing of Unix")
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
        (tmp_path / "b.txt").write_bytes(b"x" * 100)
    elif kind == "unreadable":

        def deny(path: Path, flags: int) -> int:
            raise PermissionError(13, "Permission denied", str(path))

        path.write_bytes(b"x" * 100)
        monkeypatch.setattr(os, "open", deny)
    elif kind == "large":
        path.write_bytes(b"x" * 2000)
        monkeypatch.setattr(corpus, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match=message):
        read_text(tmp_path / read)
