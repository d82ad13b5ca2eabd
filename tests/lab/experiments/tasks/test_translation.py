"""Tasks on pairs of sequences, phonemes and translation, with the text and subwords they read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posenc.errors import ArgumentError, CheckpointError, DataError
from posenc.lab.experiments.sequences import (
    RESERVED,
    SYMBOLS,
    Split,
    Subwords,
    drawn,
    read_columns,
    read_lines,
    read_parallel,
)
from posenc.lab.experiments.tasks.pairs import HELD_OUT, Pair, _dictionary, distance
from tests.lab.experiments.tasks.small import make, measured, write_pairs


def test_split_by_name_and_length() -> None:
    pairs = [
        Pair(name=str(n), source=[2] * (n % 12 + 1), target=[2] * (n % 3 + 1)) for n in range(2000)
    ]
    split = Split.of(pairs, (6, 9, 12), held_out=0.1)
    assert all(pair.length <= 6 for pair in split.train)
    assert {pair.length for pair in split.tests[6]} == {1, 2, 3, 4, 5, 6}
    assert {pair.length for pair in split.tests[9]} == {7, 8, 9}
    names = {pair.name for pair in split.train}
    assert not any(pair.name in names for tests in split.tests.values() for pair in tests)
    assert 60 < len(split.tests[6]) < 140
    with pytest.raises(DataError, match="at least 16 examples"):
        Split.of(pairs[:20], (6,), held_out=0.1)


def test_distance_counts_edits() -> None:
    assert distance("kitten", "sitting") == 3
    assert distance("", "abc") == distance("abc", "") == 3
    assert distance(["AH", "B"], ["AH", "B"]) == 0


def test_phonemes_score_against_the_closest_pronunciation(tmp_path: Path) -> None:
    task = make("phonemes", tmp_path, train_length=8)
    pairs = [pair for pair in task.split.tests[8] if len(pair.answers) > 1]
    assert task.score([list(pair.target) for pair in pairs], pairs) == (0.0, 0.0)
    assert task.score([[] for _ in pairs], pairs) == (1.0, 1.0)


def test_words_are_learned_by_their_first_pronunciation() -> None:
    sounds, pairs, _ = _dictionary(stress=False)
    (pair,) = (pair for pair in pairs if pair.name == "either")
    assert list(pair.answers) == ["IY DH ER", "AY DH ER"]
    assert [sounds[symbol - SYMBOLS] for symbol in pair.target] == ["IY", "DH", "ER"]


def test_translation_needs_a_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a parallel text, got none"):
        make("translation", tmp_path, text=None)


def test_translation_reads_two_files(tmp_path: Path) -> None:
    lines = [line.split("\t") for line in write_pairs(tmp_path).read_text().splitlines()]
    for index, name in enumerate(("a", "b")):
        (tmp_path / name).write_text("".join(f"{cells[index]}\n" for cells in lines))
    options = {"vocabulary": 30, "target": str(tmp_path / "b")}
    two = make("translation", tmp_path, train_length=8, text=tmp_path / "a", options=options)
    assert two.corpus.sha256 == make("translation", tmp_path, train_length=8).corpus.sha256


def test_right_translations_score_full_marks(tmp_path: Path) -> None:
    task = make("translation", tmp_path, train_length=16)
    pairs = [pair for pair in task.split.tests[16] if len(pair.answers[0].split()) > 3]
    assert task.score([list(pair.target) for pair in pairs], pairs) == pytest.approx((100, 100))


def test_lengths_without_enough_examples_are_refused(tmp_path: Path) -> None:
    found = measured(make("translation", tmp_path, train_length=12, test_lengths=(12, 200)), "rope")
    assert isinstance(found["bleu", 12], float)
    assert "only" in found["bleu", 200]


def test_subwords_are_learned_from_training_pairs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[str] = []
    learn = Subwords.learn

    def kept(lines: list[str], *, size: int) -> Subwords:
        learned.extend(lines)
        return learn(lines, size=size)

    monkeypatch.setattr(Subwords, "learn", kept)
    make("translation", tmp_path, train_length=8)
    pairs = [line.split("\t") for line in write_pairs(tmp_path).read_text().splitlines()]
    seen = [pair for pair in pairs if drawn(pair[0]) >= HELD_OUT]
    assert learned == [line for pair in seen for line in pair]
    assert len(seen) < len(pairs)


# Text of the user


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
    assert read_columns(tsv, 2) == one.pairs


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    text = "\ufeffone\u2028still one\x0c\x85one\r\ntwo\n"
    path = write(tmp_path / "a.txt", text.encode())
    assert read_lines(path) == ["one\u2028still one\x0c\x85one", "two"]


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


@pytest.mark.parametrize(
    ("english", "message"),
    [
        (b"one\ntwo\n", r"target: expected 3 lines in .*a\.en.*a\.de, got 2"),
        (b"one\n\nthree\n", r"line 2 of .*a\.en"),
    ],
)
def test_bad_target_file(tmp_path: Path, english: bytes, message: str) -> None:
    source = write(tmp_path / "a.de", b"eins\nzwei\ndrei\n")
    with pytest.raises(DataError, match=message):
        read_parallel(source, write(tmp_path / "a.en", english))


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


# The subword vocabulary

LINES = ["das alte Haus am Fluss", "the old house by the river", "ein Fluß, über den Bäumen"] * 3


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.learn(LINES, size=60)


def test_text_comes_back(subwords: Subwords) -> None:
    for line, ids in zip(LINES, subwords.encode(LINES), strict=True):
        assert min(ids) >= RESERVED
        assert max(ids) < subwords.size
        assert subwords.decode(ids) == line


def test_blanks_and_composed_characters_are_one(subwords: Subwords) -> None:
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
    markup = Subwords.learn(lines, size=40)
    assert markup.decode(markup.encode(lines)[0]) == lines[0]


def test_unknown_characters_are_named(subwords: Subwords) -> None:
    assert subwords.unknown("das ŋ 😀 Haus") == ["ŋ", "😀"]
    with pytest.raises(DataError, match=r"'ŋ' \(U\+014B\), '😀' \(U\+1F600\) in line 2"):
        subwords.require_characters(["das", "das ŋ 😀 Haus"], "book.de")
    assert subwords.decode(subwords.encode(["das ŋ Haus"])[0]).split() == ["das", "Haus"]


def test_saved_whole_or_refused(subwords: Subwords) -> None:
    again = Subwords.from_json(subwords.to_json(), where="vocabulary.json")
    assert again.encode(LINES) == subwords.encode(LINES)
    assert again.size == subwords.size
    with pytest.raises(CheckpointError, match=r"vocabulary\.json: expected a vocabulary"):
        Subwords.from_json(subwords.to_json()[:100], where="vocabulary.json")


def test_every_process_learns_the_same(subwords: Subwords) -> None:
    """Worker processes make it each for themselves, whatever their hash seeds."""
    program = (
        "from posenc.lab.experiments.sequences import Subwords;"
        f"print(Subwords.learn({LINES!r}, size=60).to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == subwords.to_json()
