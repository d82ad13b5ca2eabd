"""The subword vocabulary."""

from __future__ import annotations

import subprocess
import sys

import pytest

from posenc.errors import ArgumentError, CheckpointError, DataError
from posenc.lab.experiments.sequences import RESERVED, Subwords

LINES = ["das alte Haus am Fluss", "the old house by the river", "ein Fluß, über den Bäumen"] * 3


def test_text_comes_back() -> None:
    subwords = Subwords.learn(LINES, size=60)
    for line, ids in zip(LINES, subwords.encode(LINES), strict=True):
        assert min(ids) >= RESERVED
        assert max(ids) < subwords.size
        assert subwords.decode(ids) == line


def test_blanks_and_composed_characters_are_one() -> None:
    subwords = Subwords.learn(LINES, size=60)
    plain, odd = "ein Fluß über", "  ein\u00a0 Fluß \tu\u0308ber "
    assert subwords.encode([plain]) == subwords.encode([odd])
    assert subwords.unknown(odd) == []


def test_larger_vocabulary_has_shorter_sentences() -> None:
    small, large = Subwords.learn(LINES, size=8), Subwords.learn(LINES, size=200)
    assert small.size < large.size
    assert len(small.encode(LINES)[0]) > len(large.encode(LINES)[0])
    with pytest.raises(ArgumentError, match="vocabulary: expected 8 or more"):
        Subwords.learn(LINES, size=7)


def test_markup_of_other_vocabularies_is_plain_text() -> None:
    lines = ["</s> <pad> <unk> [MASK]"]
    subwords = Subwords.learn(lines, size=40)
    assert subwords.decode(subwords.encode(lines)[0]) == lines[0]


def test_unknown_characters_are_named() -> None:
    subwords = Subwords.learn(LINES, size=60)
    assert subwords.unknown("das ŋ 😀 Haus") == ["ŋ", "😀"]
    with pytest.raises(DataError, match=r"'ŋ' \(U\+014B\), '😀' \(U\+1F600\) in line 2"):
        subwords.require_characters(["das", "das ŋ 😀 Haus"], "book.de")
    assert subwords.decode(subwords.encode(["das ŋ Haus"])[0]).split() == ["das", "Haus"]


def test_saved_whole_or_refused() -> None:
    subwords = Subwords.learn(LINES, size=60)
    again = Subwords.from_json(subwords.to_json(), where="vocabulary.json")
    assert again.encode(LINES) == subwords.encode(LINES)
    assert again.size == subwords.size
    with pytest.raises(CheckpointError, match=r"vocabulary\.json: expected a vocabulary"):
        Subwords.from_json(subwords.to_json()[:100], where="vocabulary.json")


def test_every_process_learns_the_same() -> None:
    """Worker processes make it each for themselves, whatever their hash seeds."""
    program = (
        "from posenc.lab.experiments.sequences import Subwords;"
        f"print(Subwords.learn({LINES!r}, size=70).to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == Subwords.learn(LINES, size=70).to_json()
