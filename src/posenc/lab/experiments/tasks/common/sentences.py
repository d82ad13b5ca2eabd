"""Sentences with a class each, and those that a user brings."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from posenc.errors import DataError
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.sequences import Split
from posenc.lab.experiments.tasks.common.parallel import read_columns
from posenc.lab.experiments.tasks.common.task import TaskSettings

PADDING, UNKNOWN, WORDS = 0, 1, 2
"""Tokens: none, a word that is not in the vocabulary, and the first that is."""

MOST, HELD_OUT, MOST_WORDS = 1000, 0.2, 8000
"""Limits for a user's text: sentences tested per length, share held out, vocabulary size."""

Sentence = tuple[Sequence[int], int]
"""Tokens, and the class."""


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Source of sentences.

    Args:
        corpus: the data.
        vocabulary: number of tokens.
        classes: how many.
        most_frequent: share that is right by always naming the most frequent class.
        draw: so many sentences to train on.
        tests: length to sentences.
        paired: sentence 2 n + 1 has the words of sentence 2 n, in another order and class.
        trained_on: some of those to train on, where these are finite.
    """

    corpus: Corpus
    vocabulary: int
    classes: int
    most_frequent: float
    draw: Callable[[int, Random], Sequence[Sentence]]
    tests: Mapping[int, Sequence[Sentence]]
    paired: bool
    trained_on: Sequence[Sentence] = ()


@dataclass(frozen=True)
class _Labelled:
    """A sentence of the user, its class and its words."""

    name: str
    label: str
    words: Sequence[str]

    @property
    def length(self) -> int:
        return len(self.words)


def labelled(settings: TaskSettings) -> Sentences:
    """Sentences of the user; at longer lengths those that are longer than the length before.

    Raises:
        DataError: when the text is unusable.
    """
    assert settings.text is not None  # callers have looked
    columns = read_columns(settings.text, 2)
    rows = [_Labelled(text, label.strip(), _words(text)) for label, text in columns]
    labels = sorted({row.label for row in rows})
    if len(labels) < 2:
        raise DataError(
            "text",
            expected=f"two labels or more in {settings.text}",
            got=f"{labels[0]!r} only",
            remedy="Write LABEL, a tab, a sentence.",
        )
    split = Split.of(rows, settings.lengths, held_out=HELD_OUT, most=MOST, unit="words")
    counts = Counter(word for row in split.train for word in row.words)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:MOST_WORDS]
    ids = {word: WORDS + index for index, word in enumerate(common)}

    def encoded(rows: Sequence[_Labelled]) -> list[Sentence]:
        return [([ids.get(w, UNKNOWN) for w in row.words], labels.index(row.label)) for row in rows]

    train = encoded(split.train)
    tests = {length: encoded(tested) for length, tested in split.tests.items()}
    held_out = tests[settings.lengths[0]]
    most = max(Counter(label for _, label in held_out).values())
    digest = hashlib.sha256(
        "\n".join(f"{row.label}\t{row.name}" for row in rows).encode()
    ).hexdigest()
    return Sentences(
        corpus=split.corpus(
            name=f"{settings.text.name}: {len(rows):,} sentences of {len(labels)} classes",
            files=1,
            sha256=digest,
            unit="sentences",
        ),
        vocabulary=WORDS + len(ids),
        classes=len(labels),
        most_frequent=most / len(held_out),
        draw=lambda count, random: random.choices(train, k=count),
        tests=tests,
        paired=False,
        trained_on=train[: len(held_out)],
    )


def _words(text: str) -> list[str]:
    """Words in small letters, and signs, each a token."""
    return re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFC", text).lower()) or ["."]
