"""Byte-level language modelling, tested at longer contexts than trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError, DataError, LengthError
from posenc.experiments.corpus import read_corpus
from posenc.experiments.fitting import fit_note, fitted_options
from posenc.experiments.recipe import Recipe, Variant, describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.tasks.common import needles
from posenc.experiments.tasks.common.task import (
    Defaults,
    TaskEntry,
    TaskSettings,
    fingerprint,
    generator,
    seen,
    times,
)
from posenc.experiments.text_loss import (
    Profile,
    Targets,
    byte_entropy,
    pair_entropy,
    predictions,
    rows_a_call,
)
from posenc.models import Decoder, DecoderConfig
from posenc.training.memory_estimate import decoder_bytes, gigabytes, require_step

__all__ = ["ENTRY", "LanguageModelling"]

VOCABULARY = 256
SEGMENTS, NEEDLES = 256, 128
"""Segments scored, and needles asked for, at every length."""

BINS, RUN, RUNS = 16, 16, 4
"""Of the loss by position: bins, segments seen in each bin in a row, and how many such runs."""

TESTED_TOKENS = 1 << 20
"""At very long contexts there are fewer segments, needles and runs, so as to keep to this."""
FEWEST = 16

OVERFIT = 0.5
"""Bits a byte that the text trained on may cost less; files differ by less than that."""

HELD_OUT_LENGTHS = 4
"""Held-out bytes there must be, in multiples of the longest context."""


class LanguageModelling:
    """Predict each byte of real text from those before it.

    Metrics: loss on the same bytes at every context length; loss by position in the context, on
    the same bytes at every position; needles found (see ``needles``).

    Args:
        settings: of the comparison.

    Raises:
        ArgumentError: when ``needle_rows`` is no share.
        DataError: when the text is unusable, or too short for the lengths asked for.
    """

    title = "Next byte of real text, at longer contexts than trained on"
    training_unit = 1 / math.log(2)

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self._needle_rows: float = settings.options["needle_rows"]
        if not 0 <= self._needle_rows <= 1:
            raise ArgumentError(
                "needle_rows",
                expected="a share from 0 to 1",
                got=self._needle_rows,
                remedy="Try 0.25.",
            )
        corpus = read_corpus(settings.text)
        self._require_size(len(corpus.train), len(corpus.held_out))
        self._train = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
        self._held_out = torch.frombuffer(bytearray(corpus.held_out), dtype=torch.uint8)
        self.data = corpus.describe()
        self.corpus = Corpus(
            name=corpus.name,
            files=corpus.files,
            train_bytes=len(corpus.train),
            held_out_bytes=len(corpus.held_out),
            sha256=corpus.sha256,
        )
        self.fingerprint = fingerprint(
            corpus.sha256,
            settings.train_length,
            settings.width,
            settings.layers,
            settings.heads,
            settings.batch,
            self._needle_rows,
        )
        self.lengths = settings.lengths
        self.tokens_per_step = settings.batch * settings.train_length
        longest, width = settings.lengths[-1], settings.train_length // 2
        size = len(corpus.held_out)
        windows = max(FEWEST, TESTED_TOKENS // longest)
        self._targets = Targets.spread(
            size, width=width, longest=longest, count=min(SEGMENTS, windows)
        )
        self._stacks = Targets.spread(size, width=1, longest=longest, count=min(NEEDLES, windows))
        self._seen = Targets.spread(
            len(self._train), width=width, longest=settings.train_length, count=SEGMENTS
        )
        runs = min(RUNS, max(1, windows // (RUN + BINS)))
        self._profile = Profile.spread(size, length=longest, bins=BINS, run=RUN, count=runs)
        self.metrics = self._metrics()
        self.subjects = describe(
            settings.variants,
            references=settings.references,
            note=lambda encoding: fit_note(encoding, settings.train_length),
        )

    def build(self, encoding: str) -> Decoder:
        """A ``Decoder``; its learned table, if it has one, ends at the training length."""
        return Decoder(self._config(encoding))

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``inputs`` and ``targets`` ``[batch, train_length]``, windows from anywhere."""
        settings = self._settings
        draw = generator(seed, step)
        places = len(self._train) - settings.train_length
        begins = torch.randint(places, (settings.batch, 1), generator=draw)
        windows = self._train[begins + torch.arange(settings.train_length + 1)].long()
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        rows = round(self._needle_rows * settings.batch)
        if rows:
            needles.hide(inputs[:rows], targets[:rows], draw)
        return {"inputs": inputs, "targets": targets}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits = model(batch["inputs"]).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch["targets"].flatten())

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        settings = self._settings
        needed = decoder_bytes(
            cast(Decoder, model), settings.batch, settings.train_length, training=True
        )
        require_step(needed, available, rows=settings.batch, length=settings.train_length)

    def count(self, encoding: str) -> int:
        """Measurements of one run, in the pieces that ``measure`` yields."""
        pieces = len(self._settings.lengths) * (2 if self._needle_rows else 1) + 2
        return pieces * len(self._variants(encoding))

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """All metrics of the encoding and of its variants."""
        for variant in self._variants(encoding):
            view = self._through(cast(Decoder, model), variant)
            yield [self._on_trained(view, variant, seed, available)]
            for length in self._settings.lengths:
                yield [self._loss(view, variant, seed, length, available)]
            if self._needle_rows:
                for length in self._settings.lengths:
                    yield [self._recall(view, variant, seed, length, available)]
            yield self._by_position(view, variant, seed, available)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the decoder; ``Decoder.load`` reads it."""
        cast(Decoder, model).save(folder)

    def _variants(self, encoding: str) -> list[Variant]:
        return [v for v in self._settings.variants if v.encoding == encoding]

    def _config(self, encoding: str) -> DecoderConfig:
        settings = self._settings
        recipe = Recipe.parse(encoding)
        if recipe.positions != "plain":
            raise ArgumentError(
                "encoding",
                expected="positions 0, 1, 2, … of the text",
                got=encoding,
                remedy="See posenc tasks for those that draw positions: copy, for example.",
            )
        return DecoderConfig(
            vocabulary=VOCABULARY,
            dim=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            encoding=recipe.encoding,
            options=fitted_options(recipe, settings.train_length),
            max_length=settings.train_length,
        )

    def _through(self, model: Decoder, variant: Variant) -> Decoder:
        """The model as the variant looks at it: the same weights."""
        if variant.window is None:
            return model
        seen = Decoder(replace(model.config, window=variant.window))
        seen.load_state_dict(model.state_dict())
        seen.requires_grad_(requires_grad=False)
        return seen.to(_device(model)).eval()

    def _text(self, model: Decoder) -> Tensor:
        """The held-out text where the model is."""
        return self._held_out.to(_device(model))

    def _on_trained(
        self, model: Decoder, variant: Variant, seed: int, available: int | None
    ) -> Measurement | Refusal:
        length = self._settings.train_length
        reason = _refusal(model, length, available)
        if reason is not None:
            return Refusal(subject=variant.name, metric="seen", x=length, reason=reason)
        value = self._seen.loss(model, self._train.to(_device(model)), length)
        return Measurement(subject=variant.name, seed=seed, metric="seen", x=length, value=value)

    def _loss(
        self, model: Decoder, variant: Variant, seed: int, length: int, available: int | None
    ) -> Measurement | Refusal:
        reason = _refusal(model, length, available)
        if reason is not None:
            return Refusal(subject=variant.name, metric="loss", x=length, reason=reason)
        value = self._targets.loss(model, self._text(model), length)
        return Measurement(subject=variant.name, seed=seed, metric="loss", x=length, value=value)

    def _recall(
        self, model: Decoder, variant: Variant, seed: int, length: int, available: int | None
    ) -> Measurement | Refusal:
        reason = _refusal(model, length, available)
        if reason is not None:
            return Refusal(subject=variant.name, metric="recall", x=length, reason=reason)
        windows = self._stacks.windows(self._held_out, length)[:, 1:]
        stacks, answers = needles.haystacks(windows, generator(length))
        right = predictions(model, stacks.to(_device(model))) == answers
        return Measurement(
            subject=variant.name,
            seed=seed,
            metric="recall",
            x=length,
            value=float(right.double().mean()),
        )

    def _by_position(
        self, model: Decoder, variant: Variant, seed: int, available: int | None
    ) -> list[Measurement | Refusal]:
        """At the longest context, or at the training length where that is all there is."""
        key, profile = "loss_by_position", self._profile
        found: list[Measurement | Refusal] = []
        reason = _refusal(model, profile.length, available)
        if reason is not None:
            found.append(Refusal(subject=variant.name, metric=key, x=profile.length, reason=reason))
            profile = profile.shortened(self._settings.train_length)
            if _refusal(model, profile.length, available) is not None:
                return found
        found += [
            Measurement(subject=variant.name, seed=seed, metric=key, x=x, value=value)
            for x, value in profile.loss(model, self._text(model))
        ]
        return found

    def _metrics(self) -> tuple[Metric, ...]:
        entropy = byte_entropy(self._train, self._held_out)
        width, longest = self._targets.width, self._settings.lengths[-1]
        segments = len(self._targets.ends)
        metrics = [
            Metric(
                key="loss",
                label="Loss on the same bytes",
                unit="bits per byte",
                axis="context length (bytes)",
                lower_is_better=True,
                chance=entropy,
                description=f"The same {segments * width:,} held-out bytes at every length, "
                f"{width} at the end of each window: a longer window only adds context before "
                "them. The rule is what a byte costs who knows only how frequent each is.",
                headline=True,
                log_x=True,
                learned=pair_entropy(self._train, self._held_out),
                rule="the byte before alone",
                overfit=OVERFIT,
            ),
            Metric(
                key="loss_by_position",
                label="Loss by position in the context",
                unit="bits per byte",
                axis="position in the context (bytes)",
                lower_is_better=True,
                chance=entropy,
                description=f"In windows of {longest} bytes that slide over held-out text, so "
                "that every position is scored on the same bytes.",
                headline=False,
                log_x=False,
            ),
            Metric(
                key="training_loss",
                label="Training loss",
                unit="bits per byte",
                axis="training step",
                lower_is_better=True,
                chance=None,
                description="Mean over the steps since the point before"
                + (", needles included." if self._needle_rows else "."),
                headline=False,
                log_x=False,
            ),
        ]
        if self._needle_rows:
            metrics.insert(1, self._recall_metric())
        return *metrics, seen(metrics[0])

    def _recall_metric(self) -> Metric:
        return Metric(
            key="recall",
            label="Needles found",
            unit="share of needles",
            axis="context length (bytes)",
            lower_is_better=False,
            chance=needles.CHANCE,
            description="One of 16 marked bytes stands in the first eighth of a window of real "
            "text; asked at its end, how often is it named? "
            f"{self._needle_rows:.0%} of the training windows ask this within "
            f"{self._settings.train_length} bytes. The rule is a guess.",
            headline=False,
            log_x=True,
            learned=0.5,
        )

    def _require_size(self, train: int, held_out: int) -> None:
        longest = self._settings.lengths[-1]
        least_held_out = HELD_OUT_LENGTHS * longest
        least_train = 4 * (self._settings.train_length + 1)
        if held_out >= least_held_out and train >= least_train:
            return
        raise DataError(
            "text",
            expected=f"at least {least_train} bytes to train on and {least_held_out} held out, "
            f"to test at length {longest}",
            got=f"{train} and {held_out}",
            remedy="Give a longer text, or shorter test lengths.",
        )


def _refusal(model: Decoder, length: int, available: int | None) -> str | None:
    """Why a length cannot be tested; None if it can."""
    try:
        model.require_position(length - 1)
    except LengthError as error:
        return f"it needs position {length - 1}, outside {error.expected}"
    needed = decoder_bytes(model, rows_a_call(length), length, training=False)
    if available is not None and needed > available:
        return (
            f"a context of {length} would take about {gigabytes(needed)} of memory, of which "
            f"{gigabytes(available)} are free"
        )
    return None


def _device(model: Decoder) -> torch.device:
    return model.embedding.weight.device


ENTRY = TaskEntry(
    make=LanguageModelling,
    summary="Predict each byte of real text, at longer contexts than trained on",
    data="posenc's own source, shipped, or a text of your own (--text)",
    metric="bits per byte on the same bytes at every length; loss by position; needles found",
    expectation="ALiBi, KERPLE and other biases that fade with distance hold at 8 times the "
    "training length; RoPE and NoPE degrade; sinusoids break, a learned table has no positions "
    "there (Press et al. 2022, table 2; Chi et al. 2022). A plain window of the training length "
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
