"""Byte-level language modelling, tested at longer contexts than trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import Share, check
from posenc.lab.experiments.corpus import Pieces, read_corpus
from posenc.lab.experiments.recipe import Recipe, Variant
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.experiments.tasks.common.needles import byte_losses, random_windows
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Probe,
    Task,
    TaskEntry,
    TaskSettings,
    times,
)
from posenc.lab.experiments.text_loss import PositionProfile, Targets, predictions, rows_a_call
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.machine import decoder_bytes
from posenc.lab.training.seeding import generator
from posenc.models import Decoder, DecoderConfig

VOCABULARY = 256
SEGMENTS, NEEDLES = 256, 128
"""Segments scored, and needles asked for, at every length."""

BINS, RUN, RUNS = 16, 16, 4
"""Loss by position: bins, segments per bin in a row, and number of such runs."""

TESTED_TOKENS = 1 << 20
"""Bound on tested tokens: very long contexts have fewer segments, needles and runs."""
FEWEST = 16

CONTEXT = "context length (bytes)"

HELD_OUT_LENGTHS = 4
"""Least held-out text, in multiples of the longest context."""


class LanguageModelling(Task):
    """Predict each byte of real text from those before it.

    Metrics: loss on the same bytes at every context length; loss by position in the context, on
    the same bytes at every position; needles found (see ``needles``).

    Args:
        settings: of the comparison.

    Raises:
        ArgumentError: if ``needle_rows`` is no share.
        DataError: if the text is unusable, or too short for the lengths.
    """

    training_unit = 1 / math.log(2)

    def __init__(self, settings: TaskSettings) -> None:
        self._needle_rows = check(
            "needle_rows", Share, settings.options["needle_rows"], ENTRY.options["needle_rows"]
        )
        corpus = read_corpus(settings.text)
        length, longest = settings.train_length, settings.lengths[-1]
        corpus.require_size(4 * (length + 1), HELD_OUT_LENGTHS * longest, longest=longest)
        self._train, self._pieces = Pieces.joined(corpus.train)
        self._held_out, pieces = Pieces.joined(corpus.held_out)
        spread = partial(Targets.spread, pieces, longest=longest)
        width, windows = length // 2, max(FEWEST, TESTED_TOKENS // longest)
        segments = spread(width=width, count=min(SEGMENTS, windows))
        training_targets = Targets.spread(self._pieces, width=width, longest=length, count=SEGMENTS)
        self._haystacks = spread(width=1, count=min(NEEDLES, windows))
        runs = min(RUNS, max(1, windows // (RUN + BINS)))
        self._profile = PositionProfile.spread(
            pieces, length=longest, bins=BINS, run=RUN, count=runs
        )
        super().__init__(
            settings,
            title="Next byte of real text, at longer contexts than trained on",
            corpus=corpus.record(),
            metrics=self._metrics(segments, training_targets, length, longest),
            decisive=(corpus.sha256, length),
            also_decisive=(self._needle_rows,),
            example_length=length,
        )
        self.data = corpus.describe()
        self._add("seen", length, partial(_loss, training_targets, self._train, length))
        for size in self.lengths:
            self._add("loss", size, partial(_loss, segments, self._held_out, size))
        for size in self.lengths if self._needle_rows else ():
            self._add("recall", size, partial(self._recall, length=size))

    def make_model(self, recipe: Recipe) -> Decoder:
        """A ``Decoder``; a learned table ends at the training length."""
        arguments = self.model_arguments(recipe)
        return Decoder(DecoderConfig(vocabulary=VOCABULARY, **arguments))

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``inputs`` and ``targets`` ``[batch, train_length]``, windows of the text to train on."""
        length, batch = self.settings.train_length, self.settings.batch
        source = generator(seed, step)
        windows = random_windows(
            self._train, self._pieces, rows=batch, length=length + 1, source=source
        )
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        rows = round(self._needle_rows * batch)
        if rows:
            needles.hide(inputs[:rows], targets[:rows], source)
        return {"inputs": inputs, "targets": targets}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits = model(batch["inputs"]).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch["targets"].flatten())

    def bytes_needed(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        """Memory that the decoder's backends need, in bytes."""
        return decoder_bytes(cast(Decoder, model), rows, length, training=training)

    def count(self, encoding: str) -> int:
        """Number of measurements: all probes and the loss by position, for each variant."""
        return (len(self.probes) + 1) * len(self._variants(encoding))

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | RefusedMeasurement]]:
        """All metrics of the encoding and of its variants."""
        for variant in self._variants(encoding):
            view = _through(cast(Decoder, model), variant)
            for probe in self.probes:
                yield probe.measure(view, subject=variant.name, seed=seed, available=available)
            yield self._by_position(view, variant, seed, available)

    def _variants(self, encoding: str) -> list[Variant]:
        return [variant for variant in self.settings.variants if variant.encoding == encoding]

    def _add(self, metric: str, x: int, run: Callable[[nn.Module], Sequence[float]]) -> None:
        self.add_probe((metric,), x, run, rows=rows_a_call(x))

    def _recall(self, model: nn.Module, length: int) -> tuple[float]:
        windows = self._haystacks.windows(self._held_out, length)[:, 1:]
        stacks, answers = needles.haystacks(windows, generator(length))
        right = predictions(model, stacks.to(_device(model))) == answers
        return (float(right.double().mean()),)

    def _by_position(
        self, model: Decoder, variant: Variant, seed: int, available: int | None
    ) -> list[Measurement | RefusedMeasurement]:
        """Loss by position at the longest context; if that is refused, at the training length."""
        key = "loss_by_position"
        refusals: list[Measurement | RefusedMeasurement] = []
        for profile in (self._profile, self._profile.shortened(self.settings.train_length)):
            length = profile.length
            needs = partial(
                self.bytes_needed, rows=rows_a_call(length), length=length, training=False
            )
            run = partial(_curve, profile, self._held_out)
            probe = Probe(metrics=(key,), x=length, run=run, needs=needs)
            values = probe.attempt(model, available)
            if not isinstance(values, str):
                return refusals + [
                    Measurement(subject=variant.name, seed=seed, metric=key, x=x, value=value)
                    for x, value in zip(profile.middles, values, strict=True)
                ]
            refusals.append(
                RefusedMeasurement(subject=variant.name, metric=key, x=length, reason=values)
            )
        return refusals[:1]

    def _metrics(
        self, segments: Targets, training_targets: Targets, length: int, longest: int
    ) -> list[Metric]:
        width = segments.width
        loss, training, on_training = byte_losses(
            self._train,
            (self._held_out, segments.places),
            (self._train, training_targets.places),
            training=", needles included." if self._needle_rows else ".",
            label="Loss on the same bytes",
            axis=CONTEXT,
            description=f"The same {len(segments.ends) * width:,} held-out bytes at every length, "
            f"{width} at the end of each window: a longer window only adds context before them.",
        )
        recall = Metric(
            key="recall",
            label="Needles found",
            unit="share of needles",
            axis=CONTEXT,
            lower_is_better=False,
            trivial=needles.CHANCE,
            description="One of 16 marked bytes stands in the first eighth of a window of real "
            f"text; asked at its end, how often is it named? {self._needle_rows:.0%} of the "
            f"training windows ask this within {length} bytes. The rule is a guess.",
            learned=0.5,
        )
        by_position = Metric(
            key="loss_by_position",
            label="Loss by position in the context",
            unit="bits per byte",
            axis="position in the context (bytes)",
            lower_is_better=True,
            trivial=loss.trivial,
            trivial_rule=loss.trivial_rule,
            description=f"In windows of {longest} bytes that slide over held-out text, so "
            "that every position is scored on the same bytes.",
        )
        recalls = [recall] if self._needle_rows else []
        return [loss, *recalls, by_position, training, on_training]


def _through(model: Decoder, variant: Variant) -> Decoder:
    """A decoder of the same weights, with the variant's window."""
    if variant.window is None:
        return model
    view = Decoder(replace(model.config, window=variant.window))
    view.load_state_dict(model.state_dict())
    view.requires_grad_(requires_grad=False)
    return view.to(_device(model)).eval()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _loss(targets: Targets, text: Tensor, length: int, model: nn.Module) -> tuple[float]:
    return (targets.loss(model, text.to(_device(model)), length),)


def _curve(profile: PositionProfile, text: Tensor, model: nn.Module) -> list[float]:
    return [value for _, value in profile.loss(model, text.to(_device(model)))]


ENTRY = TaskEntry(
    make=LanguageModelling,
    summary="Predict each byte of real text, at longer contexts than trained on",
    data="posenc's own source, shipped, or a text of your own (--text)",
    metric="bits per byte on the same bytes at every length; loss by position; needles found",
    expectation="ALiBi, KERPLE and other biases that fade with distance hold at 8 times the "
    "training length; RoPE and NoPE degrade; sinusoids break, a learned table has no positions "
    "there (Press et al. 2021, table 2; Chi et al. 2022). A plain window of the training length "
    "ties the best on loss but finds no needle beyond it.",
    defaults=Defaults(
        encodings=("rope", "alibi", "t5", "sinusoidal", "learned", "nope"),
        references=("nope", "rope|window"),
        train_length=64,
        test_lengths=times(1, 2, 4, 8),
        steps=600,
    ),
    options={"needle_rows": 0.25},
    length_unit="bytes",
    reads_text=True,
    windows=True,
)
