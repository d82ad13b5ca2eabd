"""Classify sentences whose classes differ in the order of their words alone."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import torch
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.lab.experiments.recipe import Recipe
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.sequences import FEWEST, Split, read_columns, real, stacked
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    seen,
    times,
    training_loss,
)
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.seeding import fingerprint
from posenc.models import EncoderConfig, TextClassifier

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


PAIRS, ROWS = 256, 128
"""Minimal pairs tested at a length, and sentences at a time."""


class WordOrder(Task):
    """A bidirectional encoder that classifies sentences, longer ones than it was trained on.

    Args:
        settings: of the comparison.

    Raises:
        DataError: if the user's text is unusable.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self._sentences = _generated(settings) if settings.text is None else labelled(settings)
        metrics = _metrics(self._sentences)
        super().__init__(
            settings,
            title="Who does it to whom? Sentences told apart by the order of their words"
            if settings.text is None
            else "Classify sentences, longer than any in training",
            corpus=self._sentences.corpus,
            metrics=metrics,
            decisive=(self._sentences.corpus.sha256, settings.train_length),
            example_length=settings.train_length,
        )
        keys = tuple(m.key for m in metrics if m.key not in ("training_loss", "seen"))
        for length, sentences in self._sentences.tests.items():
            if len(sentences) < FEWEST:
                count = len(sentences)
                self.lacking[length] = f"the text has only {count} sentences of this length"
                continue
            self.add_probe(keys, length, partial(self._score, sentences=sentences), rows=ROWS)
        if self._sentences.trained_on:
            run = partial(self._score, sentences=self._sentences.trained_on)
            self.add_probe(("seen",), settings.train_length, run)

    def make_model(self, recipe: Recipe) -> TextClassifier:
        """A ``TextClassifier``; a learned table ends where training ends."""
        config = EncoderConfig(
            vocabulary=self._sentences.vocabulary,
            classes=self._sentences.classes,
            norm_first=True,
            **self.model_arguments(recipe),
        )
        return TextClassifier(config)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``tokens`` ``[batch, L]``, padded on the right, and their ``sizes`` and ``classes``."""
        source = Random(repr((seed, step)))
        return _padded(self._sentences.draw(self.settings.batch, source))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits = _logits(model, batch).float()
        return nn.functional.cross_entropy(logits, batch["classes"])

    @torch.inference_mode()
    def _score(self, model: nn.Module, sentences: Sequence[Sentence]) -> Sequence[float]:
        device = next(model.parameters()).device
        parts = []
        for begin in range(0, len(sentences), ROWS):
            batch = _padded(sentences[begin : begin + ROWS])
            logits = _logits(model, {name: x.to(device) for name, x in batch.items()})
            parts.append(logits.argmax(-1).cpu() == batch["classes"])
        right = torch.cat(parts)
        accuracy = float(right.double().mean())
        if not self._sentences.paired:
            return (accuracy,)
        return accuracy, float(right.view(-1, 2).all(1).double().mean())


def _metrics(sentences: Sentences) -> list[Metric]:
    metric = partial(Metric, axis="length (words)", lower_is_better=False)
    level = sentences.most_frequent
    accuracy = metric(
        key="accuracy",
        label="Sentences classified right",
        unit="share of sentences",
        trivial=level,
        trivial_rule="the most frequent class",
        description="Share of sentences. The rule is what naming the most frequent class reaches.",
        headline=True,
        learned=level + 0.5 * (1 - level) if sentences.paired else None,
    )
    pairs = metric(
        key="pairs",
        label="Minimal pairs told apart",
        unit="share of pairs",
        trivial=0.0,
        trivial_rule="any answer without word order",
        description="Share of pairs of sentences with the same words of which both are "
        "classified right. Who sees only which words there are answers both alike: none.",
    )
    metrics = [accuracy, *([pairs] if sentences.paired else [])]
    metrics.append(training_loss("nats per sentence"))
    return [*metrics, seen(accuracy)] if sentences.trained_on else metrics


def _generated(settings: TaskSettings) -> Sentences:
    """Sentences of the grammar; at each length all of exactly that many words."""
    ids = {word: FIRST_WORD + index for index, word in enumerate(WORDS)}

    def pair(length: int, random: Random) -> list[Sentence]:
        scene = draw_scene(length, random)
        return [
            ([ids[word] for word in version.words()], int(version.person_acts))
            for version in (scene, scene.turned())
        ]

    def draw(rows: int, random: Random) -> Sequence[Sentence]:
        sentences: list[Sentence] = []
        while len(sentences) < rows:
            sentences += pair(random.randint(SHORTEST, settings.train_length), random)
        return sentences[:rows]

    tests = {}
    for length in settings.lengths:
        source = Random(repr(("test", length)))
        tests[length] = [sentence for _ in range(PAIRS) for sentence in pair(length, source)]
    longest = settings.train_length
    corpus = Corpus(
        name=f"a grammar of {len(ids)} words, {SHORTEST} to {longest} of them in training",
        sha256=fingerprint("word_order", WORDS, settings.lengths),
        held_out_bytes=2 * PAIRS * len(tests),
        unit="sentences",
    )
    return Sentences(
        corpus=corpus,
        vocabulary=FIRST_WORD + len(ids),
        classes=2,
        most_frequent=0.5,
        draw=draw,
        tests=tests,
        paired=True,
    )


def _padded(sentences: Sequence[Sentence]) -> dict[str, Tensor]:
    rows, classes = zip(*sentences, strict=True)
    return {
        "tokens": stacked(rows, PADDING),
        "sizes": torch.tensor([len(row) for row in rows]),
        "classes": torch.tensor(classes),
    }


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    tokens = batch["tokens"]
    logits: Tensor = model(tokens, real(tokens.shape[1], batch["sizes"]))
    return logits


ENTRY = TaskEntry(
    make=WordOrder,
    summary="Tell who does it to whom, in sentences with the same words in another order",
    data="minimal pairs of a grammar, generated; or a text of your own (--text FILE.tsv: label, "
    "tab, sentence)",
    metric="share of sentences right; share of minimal pairs told apart",
    expectation="Without positions an encoder sees a bag of words: the control nope must stay at "
    "one half, and tell no pair apart. Classifiers gain most from positions where order matters "
    "(Wang et al. 2019, table 2).",
    defaults=Defaults(
        encodings=("sinusoidal", "learned", "rope", "t5", "alibi", "shaw"),
        references=("nope",),
        train_length=12,
        test_lengths=times(1, 1.5, 2, 4),
        steps=1500,
        learning_rate=3e-3,
    ),
    length_unit="words",
    reads_text=True,
)
