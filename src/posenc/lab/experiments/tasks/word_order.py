"""Classify sentences whose classes differ in the order of their words alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import cast

import torch
from torch import Tensor, nn

from posenc.lab.experiments.recipe import Recipe
from posenc.lab.experiments.results import Corpus, Metric
from posenc.lab.experiments.sequences import FEWEST, real, stacked
from posenc.lab.experiments.tasks.common.sentences import (
    FIRST_WORD,
    PADDING,
    SHORTEST,
    WORDS,
    Sentence,
    Sentences,
    draw_scene,
    labelled,
)
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    seen,
    times,
    training_loss,
)
from posenc.lab.training.seeding import fingerprint
from posenc.models import EncoderConfig, TextClassifier

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
            vocabulary=self._sentences.vocabulary, norm_first=True, **self.model_arguments(recipe)
        )
        return TextClassifier(config, classes=self._sentences.classes)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``tokens`` ``[batch, L]``, padded on the right, and their ``sizes`` and ``classes``."""
        source = Random(repr((seed, step)))
        return _padded(self._sentences.draw(self.settings.batch, source))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits = _logits(model, batch).float()
        return nn.functional.cross_entropy(logits, batch["classes"])

    def stack_config(self, model: nn.Module) -> EncoderConfig:
        """Configuration of the encoder."""
        return cast(TextClassifier, model).encoder.config

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
