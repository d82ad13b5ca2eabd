"""Classify sentences of which the order of words is all that tells the classes apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import cast

import torch
from torch import Tensor, nn

from posenc.experiments.fitting import fit_note, fitted_options
from posenc.experiments.recipe import describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.sequences import real, stacked
from posenc.experiments.tasks.common import grammar
from posenc.experiments.tasks.common.pairs import plain_recipe
from posenc.experiments.tasks.common.sentences import (
    FEWEST,
    PADDING,
    WORDS,
    Sentence,
    Sentences,
    labelled,
)
from posenc.experiments.tasks.common.task import (
    Defaults,
    Probe,
    TaskEntry,
    TaskSettings,
    fingerprint,
    probed,
    seen,
    times,
)
from posenc.models import EncoderConfig, TextClassifier
from posenc.training.memory_estimate import require_step, stack_bytes

__all__ = ["ENTRY"]

PAIRS, ROWS = 256, 128
"""Minimal pairs tested at a length, and sentences at a time."""


class WordOrder:
    """A bidirectional encoder that classifies sentences, longer ones than it was trained on.

    Args:
        settings: of the comparison.

    Raises:
        DataError: when the user's text is unusable.
    """

    title = "Who does it to whom? Sentences told apart by the order of their words"
    training_unit = 1.0

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self._sentences = _generated(settings) if settings.text is None else labelled(settings)
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
        self._keys = tuple(m.key for m in self.metrics if m.key not in ("training_loss", "seen"))
        self._probes = [
            Probe(
                metrics=self._keys,
                x=length,
                run=lambda model, sentences=sentences: self._score(  # type: ignore[misc]
                    model, sentences
                ),
                needs=lambda model, length=length: self._bytes(  # type: ignore[misc]
                    model, ROWS, length, training=False
                ),
            )
            for length, sentences in self._sentences.tests.items()
            if len(sentences) >= FEWEST
        ]
        self._tested = len(self._probes)
        if self._sentences.trained_on:
            self._probes.append(
                Probe(
                    metrics=("seen",),
                    x=settings.train_length,
                    run=lambda model: self._score(model, self._sentences.trained_on),
                )
            )

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
        """One measurement a length that has enough sentences, and one of those trained on."""
        return len(self._probes) + (self._tested < len(self.lengths))

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
        if self._sentences.trained_on:
            found.append(seen(found[0]))
        return tuple(found)


def _generated(settings: TaskSettings) -> Sentences:
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
