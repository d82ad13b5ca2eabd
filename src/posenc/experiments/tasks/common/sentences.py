"""Sentences with a class each, and those that a user brings."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from posenc.errors import DataError
from posenc.experiments.results import Corpus
from posenc.experiments.sequences import drawn
from posenc.experiments.tasks.common.parallel import read_columns
from posenc.experiments.tasks.common.task import TaskSettings

PADDING, UNKNOWN, WORDS = 0, 1, 2
"""Tokens: none, a word that is not in the vocabulary, and the first that is."""

MOST, FEWEST, HELD_OUT, MOST_WORDS = 1000, 16, 0.2, 8000
"""Of a user's text: sentences tested at a length at most and at least, the share held out, and
words of the vocabulary."""

Sentence = tuple[Sequence[int], int]
"""Tokens, and the class."""


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Source of sentences.

    Args:
        corpus: the data.
        vocabulary: number of tokens.
        classes: how many.
        chance: share that is right by always naming the most frequent class.
        draw: so many sentences to train on.
        tests: length to sentences.
        paired: sentence 2 n + 1 has the words of sentence 2 n, in another order and class.
        trained_on: some of those to train on, where these are finite.
    """

    corpus: Corpus
    vocabulary: int
    classes: int
    chance: float
    draw: Callable[[int, Random], Sequence[Sentence]]
    tests: Mapping[int, Sequence[Sentence]]
    paired: bool
    trained_on: Sequence[Sentence] = ()


def labelled(settings: TaskSettings) -> Sentences:
    """Sentences of the user; at longer lengths those that are longer than the length before.

    Raises:
        DataError: when the text is unusable.
    """
    assert settings.text is not None  # callers have looked
    rows = [(label.strip(), _words(text), text) for label, text in read_columns(settings.text, 2)]
    labels = sorted({label for label, _, _ in rows})
    if len(labels) < 2:
        raise _unusable(settings.text, "two labels or more", f"{labels[0]!r} only")
    train_rows = [
        (label, words)
        for label, words, text in rows
        if len(words) <= settings.train_length and drawn(text) >= HELD_OUT
    ]
    counts = Counter(word for _, words in train_rows for word in words)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:MOST_WORDS]
    ids = {word: WORDS + index for index, word in enumerate(common)}

    def sentence(label: str, words: Sequence[str]) -> Sentence:
        return [ids.get(word, UNKNOWN) for word in words], labels.index(label)

    train = [sentence(label, words) for label, words in train_rows]
    ranked = sorted(rows, key=lambda row: drawn(row[2]))
    tests = {
        settings.lengths[0]: [
            sentence(label, words)
            for label, words, text in ranked
            if len(words) <= settings.lengths[0] and drawn(text) < HELD_OUT
        ][:MOST]
    }
    for before, length in pairwise(settings.lengths):
        tests[length] = [
            sentence(label, words) for label, words, _ in ranked if before < len(words) <= length
        ][:MOST]
    held_out = tests[settings.lengths[0]]
    if len(train) < FEWEST or len(held_out) < FEWEST:
        expected = f"{FEWEST} sentences of at most {settings.train_length} words to train on, and "
        expected += f"{FEWEST} held out"
        raise _unusable(settings.text, expected, f"{len(train)} and {len(held_out)}")
    most = max(Counter(label for _, label in held_out).values())
    digest = hashlib.sha256("\n".join(f"{a}\t{c}" for a, _, c in rows).encode()).hexdigest()
    return Sentences(
        corpus=Corpus(
            name=f"{settings.text.name}: {len(rows):,} sentences of {len(labels)} classes",
            files=1,
            train_bytes=len(train),
            held_out_bytes=sum(map(len, tests.values())),
            sha256=digest,
            unit="sentences",
        ),
        vocabulary=WORDS + len(ids),
        classes=len(labels),
        chance=most / len(held_out),
        draw=lambda count, random: random.choices(train, k=count),
        tests=tests,
        paired=False,
        trained_on=train[: len(held_out)],
    )


def _words(text: str) -> list[str]:
    """Words in small letters, and signs, each a token."""
    return re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFC", text).lower()) or ["."]


def _unusable(path: Path, expected: str, got: str) -> DataError:
    return DataError(
        "text", expected=f"{expected} in {path}", got=got, remedy="Write LABEL, a tab, a sentence."
    )
