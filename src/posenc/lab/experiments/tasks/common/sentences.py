"""Sentences with a class each: of a grammar with agents and patients, or brought by a user."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from posenc.errors import DataError
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.sequences import Split
from posenc.lab.experiments.tasks.common.parallel import read_columns
from posenc.lab.experiments.tasks.common.task import TaskSettings

PEOPLE = ("man", "woman", "boy", "girl", "farmer", "teacher", "doctor", "sailor", "nurse", "king")
ANIMALS = ("dog", "cat", "horse", "goat", "fox", "bear", "goose", "donkey", "wolf", "sheep")
VERBS = ("chased", "followed", "watched", "helped", "scared", "carried", "pushed", "washed")
ADJECTIVES = ("old", "young", "small", "big", "tired", "quiet", "happy", "hungry")
PREPOSITIONS = ("near", "behind", "beside")
PLACES = ("river", "house", "garden", "bridge", "tree", "road")
LITTLE = ("the", "that", "was", "by")

WORDS: tuple[str, ...] = (*LITTLE, *PEOPLE, *ANIMALS, *VERBS, *ADJECTIVES, *PREPOSITIONS, *PLACES)
"""Words of the vocabulary."""

SHORTEST = 5
"""Words of the shortest sentence: the dog chased the man."""

PASSIVE = 0.3
"""Share of clauses in the passive voice, which turns round who acts."""


@dataclass
class Phrase:
    """``the ADJECTIVE… NOUN (near the PLACE) (that …)``."""

    noun: str
    adjectives: list[str] = field(default_factory=list)
    place: tuple[str, str] | None = None
    relative: Relative | None = None

    def words(self) -> list[str]:
        place = [] if self.place is None else [self.place[0], "the", self.place[1]]
        relative = [] if self.relative is None else self.relative.words()
        return ["the", *self.adjectives, self.noun, *place, *relative]


@dataclass
class Relative:
    """``that VERB the …``, ``that was VERB by the …`` or ``that the … VERB``."""

    verb: str
    kind: str
    other: Phrase

    def words(self) -> list[str]:
        if self.kind == "object":
            return ["that", *self.other.words(), self.verb]
        return ["that", *_verb(self.verb, self.kind), *self.other.words()]


@dataclass
class Scene:
    """A main clause about a person and an animal.

    Args:
        first, second: its noun phrases, one of each kind.
        verb: between them.
        kind: ``"active"`` or ``"passive"``.
    """

    first: Phrase
    second: Phrase
    verb: str
    kind: str

    def words(self) -> list[str]:
        """The sentence."""
        return [*self.first.words(), *_verb(self.verb, self.kind), *self.second.words()]

    @property
    def person_acts(self) -> bool:
        """True if the person is the agent."""
        actor = self.first if self.kind == "active" else self.second
        return actor.noun in PEOPLE

    def turned(self) -> Scene:
        """The scene with person and animal exchanged, and everything else in place."""
        first, second = self.first, self.second
        return Scene(
            Phrase(second.noun, first.adjectives, first.place, first.relative),
            Phrase(first.noun, second.adjectives, second.place, second.relative),
            self.verb,
            self.kind,
        )


def draw_scene(length: int, random: Random) -> Scene:
    """A scene whose sentence has exactly ``length`` words, ``SHORTEST`` or more."""
    nouns = [random.choice(PEOPLE), random.choice(ANIMALS)]
    random.shuffle(nouns)
    phrases = [Phrase(noun) for noun in nouns]
    passive = length >= SHORTEST + 2 and random.random() < PASSIVE
    kind = "passive" if passive else "active"
    scene = Scene(phrases[0], phrases[1], random.choice(VERBS), kind)
    left = length - SHORTEST - 2 * passive
    while left:
        left -= _grown(phrases, left, random)
    return scene


def _grown(phrases: list[Phrase], budget: int, random: Random) -> int:
    """Make a phrase longer by at most ``budget`` words; returns the number added."""
    phrase = random.choice(phrases)
    kinds: Sequence[str] = [
        kind
        for kind, words in (("active", 4), ("object", 4), ("passive", 6))
        if words <= budget and phrase.relative is None
    ]
    fate = random.random()
    if kinds and fate < 0.5:
        kind = random.choice(kinds)
        other = Phrase(random.choice(PEOPLE + ANIMALS))
        phrase.relative = Relative(random.choice(VERBS), kind, other)
        phrases.append(other)
        return 6 if kind == "passive" else 4
    if budget >= 3 and phrase.place is None and fate < 0.8:
        phrase.place = random.choice(PREPOSITIONS), random.choice(PLACES)
        return 3
    phrase.adjectives.append(random.choice(ADJECTIVES))
    return 1


def _verb(verb: str, kind: str) -> list[str]:
    return ["was", verb, "by"] if kind == "passive" else [verb]


PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
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
    ids = {word: FIRST_WORD + index for index, word in enumerate(common)}

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
        vocabulary=FIRST_WORD + len(ids),
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
