"""Classify sentences of which the order of words is all that tells the classes apart."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.lab.fitting import fit_note, fitted_options
from posenc.lab.footprint import require_step, stack_bytes
from posenc.lab.results import Corpus, Measurement, Metric, Refusal
from posenc.lab.sequences import drawn, real, stacked
from posenc.lab.subjects import describe
from posenc.lab.tasks import grammar
from posenc.lab.tasks.pairs import plain_recipe
from posenc.lab.tasks.task import Defaults, Probe, TaskEntry, fingerprint, probed, times
from posenc.lab.translation.parallel import read_columns
from posenc.models import EncoderConfig, TextClassifier

if TYPE_CHECKING:
    from posenc.lab.settings import Settings

__all__ = ["ENTRY"]

PADDING, UNKNOWN, WORDS = 0, 1, 2
"""Tokens: none, a word that is not in the vocabulary, and the first that is."""

PAIRS, ROWS = 256, 128
"""Minimal pairs tested at a length, and sentences at a time."""

MOST, FEWEST, HELD_OUT, MOST_WORDS = 1000, 16, 0.2, 8000
"""Of a user's text: sentences tested at a length at most and at least, the share held out, and
words of the vocabulary."""

Sentence = tuple[Sequence[int], int]
"""Tokens, and the class."""


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Where sentences come from.

    Args:
        data: what they are, in a phrase.
        corpus: the same for the record.
        vocabulary: tokens there are.
        classes: how many.
        chance: share that is right by always naming the most frequent class.
        draw: so many sentences to train on.
        tests: length to sentences.
        paired: sentence 2 n + 1 has the words of sentence 2 n, in another order and class.
    """

    data: str
    corpus: Corpus
    vocabulary: int
    classes: int
    chance: float
    draw: Callable[[int, Random], Sequence[Sentence]]
    tests: Mapping[int, Sequence[Sentence]]
    paired: bool


class WordOrder:
    """A bidirectional encoder that classifies sentences, longer ones than it was trained on.

    Args:
        settings: of the comparison.

    Raises:
        DataError: when the user's text is unusable.
    """

    title = "Who does it to whom? Sentences told apart by the order of their words"
    training_unit = 1.0

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sentences = _generated(settings) if settings.text is None else _labelled(settings)
        if settings.text is not None:
            self.title = "Classify sentences, longer than any in training"
        self.data, self.corpus = self._sentences.data, self._sentences.corpus
        self.lengths = settings.lengths
        self.tokens_per_step = settings.batch * settings.train_length
        self.fingerprint = fingerprint(
            self.corpus.sha256,
            settings.train_length,
            settings.width,
            settings.layers,
            settings.heads,
            settings.batch,
        )
        self.metrics = self._metrics()
        self.subjects = describe(
            settings.variants,
            references=settings.references,
            note=lambda encoding: fit_note(encoding, settings.train_length),
        )
        self._keys = tuple(m.key for m in self.metrics if m.key != "training_loss")
        self._probes = [
            Probe(
                metrics=self._keys,
                x=length,
                run=lambda model, length=length: self._score(model, length),  # type: ignore[misc]
                needs=lambda model, length=length: self._bytes(  # type: ignore[misc]
                    model, ROWS, length, training=False
                ),
            )
            for length, sentences in self._sentences.tests.items()
            if len(sentences) >= FEWEST
        ]

    def build(self, encoding: str) -> TextClassifier:
        """A ``TextClassifier``; a learned table, if it has one, ends where training ends."""
        recipe, settings = plain_recipe(encoding), self._settings
        config = EncoderConfig(
            vocabulary=self._sentences.vocabulary,
            dim=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            encoding=recipe.encoding,
            options=fitted_options(recipe, settings.train_length),
            max_length=settings.train_length,
            norm_first=True,
        )
        return TextClassifier(config, classes=self._sentences.classes)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``tokens`` ``[batch, L]``, padded on the right, and their ``sizes`` and ``classes``."""
        source = Random(repr((seed, step)))
        return _padded(self._sentences.draw(self._settings.batch, source))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits = _logits(model, batch).float()
        return nn.functional.cross_entropy(logits, batch["classes"])

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        rows, length = self._settings.batch, self._settings.train_length
        needed = self._bytes(model, rows, length, training=True)
        require_step(needed, available, rows=rows, length=length)

    def count(self, encoding: str) -> int:
        """One measurement a length that has enough sentences."""
        return len(self._probes) + (len(self._probes) < len(self.lengths))

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """All metrics at every length."""
        yield from probed(self._probes, model, subject=encoding, seed=seed, available=available)
        lacking: list[Measurement | Refusal] = [
            Refusal(
                subject=encoding,
                metric=metric,
                x=length,
                reason=f"the text has only {len(sentences)} sentences of this length",
            )
            for length, sentences in self._sentences.tests.items()
            if len(sentences) < FEWEST
            for metric in self._keys
        ]
        if lacking:
            yield lacking

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model; ``TextClassifier.load`` reads it."""
        cast(TextClassifier, model).save(folder)

    @torch.inference_mode()
    def _score(self, model: nn.Module, length: int) -> Sequence[float]:
        sentences = self._sentences.tests[length]
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

    def _bytes(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        return stack_bytes(
            cast(TextClassifier, model).encoder.config,
            layers=self._settings.layers,
            vocabulary=0,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            rows=rows,
            length=length,
            training=training,
        )

    def _metrics(self) -> tuple[Metric, ...]:
        log_x = self.lengths[-1] > 2 * self.lengths[0]
        found = [
            Metric(
                key="accuracy",
                label="Sentences classified right",
                unit="share of sentences",
                axis="length (words)",
                lower_is_better=False,
                chance=self._sentences.chance,
                description="Share of sentences. The rule is what naming the most frequent class "
                "reaches.",
                headline=True,
                log_x=log_x,
                learned=self._sentences.chance + 0.5 * (1 - self._sentences.chance)
                if self._sentences.paired
                else None,
            ),
            Metric(
                key="training_loss",
                label="Training loss",
                unit="nats per sentence",
                axis="training step",
                lower_is_better=True,
                chance=None,
                description="Mean over the steps since the point before.",
                headline=False,
                log_x=False,
            ),
        ]
        if self._sentences.paired:
            pairs = Metric(
                key="pairs",
                label="Minimal pairs told apart",
                unit="share of pairs",
                axis="length (words)",
                lower_is_better=False,
                chance=0.0,
                description="Share of pairs of sentences with the same words of which both are "
                "classified right. Who sees only which words there are answers both alike: none.",
                headline=False,
                log_x=log_x,
            )
            found.insert(1, pairs)
        return tuple(found)


def _generated(settings: Settings) -> Sentences:
    """Sentences of the grammar; at each length all of exactly that many words."""
    ids = {word: WORDS + index for index, word in enumerate(grammar.WORDS)}

    def pair(length: int, random: Random) -> list[Sentence]:
        scene = grammar.draw_scene(length, random)
        both = (scene, scene.turned())
        return [([ids[word] for word in one.words()], int(one.person_acts)) for one in both]

    def draw(rows: int, random: Random) -> Sequence[Sentence]:
        found: list[Sentence] = []
        while len(found) < rows:
            found += pair(random.randint(grammar.SHORTEST, settings.train_length), random)
        return found[:rows]

    tests = {}
    for length in settings.lengths:
        source = Random(repr(("test", length)))
        tests[length] = [one for _ in range(PAIRS) for one in pair(length, source)]
    data = f"a grammar of {len(ids)} words, {grammar.SHORTEST} to {settings.train_length} of them "
    data += "in training"
    return Sentences(
        data=data,
        corpus=Corpus(
            name=data,
            files=0,
            train_bytes=0,
            held_out_bytes=2 * PAIRS * len(tests),
            sha256=fingerprint("word_order", grammar.WORDS, settings.lengths),
            unit="sentences",
        ),
        vocabulary=WORDS + len(ids),
        classes=2,
        chance=0.5,
        draw=draw,
        tests=tests,
        paired=True,
    )


def _labelled(settings: Settings) -> Sentences:
    """Sentences of the user; at longer lengths those that are longer than the length before."""
    assert settings.text is not None  # who calls this has looked
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
    data = f"{settings.text.name}: {len(rows):,} sentences of {len(labels)} classes"
    return Sentences(
        data=data,
        corpus=Corpus(
            name=data,
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
    )


def _words(text: str) -> list[str]:
    """Words in small letters, and signs, each a token."""
    return re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFC", text).lower()) or ["."]


def _unusable(path: Path, expected: str, got: str) -> DataError:
    return DataError(
        "text", expected=f"{expected} in {path}", got=got, remedy="Write LABEL, a tab, a sentence."
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
    "(Wang et al. 2020, table 2).",
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
