"""Masked bytes of real text, restored from both sides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.experiments.corpus import read_corpus
from posenc.experiments.fitting import fit_note, fitted_options
from posenc.experiments.recipe import describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.tasks.common.pairs import plain_recipe
from posenc.experiments.tasks.common.task import (
    Defaults,
    Probe,
    TaskEntry,
    TaskSettings,
    fingerprint,
    generator,
    probed,
    seen,
    times,
)
from posenc.experiments.text_loss import byte_entropy, pair_entropy, restored, rows_a_call
from posenc.models import EncoderConfig, MaskedLM, mask_tokens, token_loss
from posenc.training.memory_estimate import require_step, stack_bytes

__all__ = ["ENTRY", "MASK", "MaskedBytes"]

MASK, VOCABULARY = 256, 257
RATE = 0.15
OVERFIT = 0.5
"""Bits a byte that the text trained on may cost less; files differ by less than that."""

WINDOWS, TESTED_TOKENS = 512, 1 << 18
"""Windows scored at every length, and at most so many tokens of the longest ones."""


class MaskedBytes:
    """Restore masked bytes of real text from both sides, at longer contexts than trained on.

    At test the same bytes are masked and scored at every length, those in the middle half of the
    shortest window: a longer one only adds context on both sides, masked at the same rate.

    Args:
        settings: of the comparison.

    Raises:
        DataError: when the text is unusable, or too short for the lengths asked for.
    """

    title = "Masked bytes of real text, from both sides, at longer contexts than trained on"
    training_unit = 1 / math.log(2)

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        corpus = read_corpus(settings.text)
        longest = settings.lengths[-1]
        if len(corpus.train) < 4 * settings.train_length or len(corpus.held_out) < 4 * longest:
            raise DataError(
                "text",
                expected=f"at least {4 * settings.train_length} bytes to train on and "
                f"{4 * longest} held out, to test at length {longest}",
                got=f"{len(corpus.train)} and {len(corpus.held_out)}",
                remedy="Give a longer text, or shorter test lengths.",
            )
        self._train = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
        held_out = torch.frombuffer(bytearray(corpus.held_out), dtype=torch.uint8)
        self._entropy = byte_entropy(self._train, held_out)
        self._pair_entropy = pair_entropy(self._train, held_out)
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
        )
        self.lengths = settings.lengths
        self.tokens_per_step = settings.batch * settings.train_length
        windows = max(1, min(WINDOWS, TESTED_TOKENS // longest))
        begins = torch.arange(windows) * (len(held_out) - longest) // windows
        self._windows = held_out[begins.unsqueeze(1) + torch.arange(longest)].long()
        length = settings.train_length
        begins = torch.arange(windows) * (len(self._train) - length) // windows
        self._seen = self._train[begins.unsqueeze(1) + torch.arange(length)].long()
        self._masked = torch.rand(windows, longest, generator=generator(longest)) < RATE
        self.metrics = self._metrics()
        self.subjects = describe(
            settings.variants,
            references=settings.references,
            note=lambda encoding: fit_note(encoding, settings.train_length),
        )
        self._probes = [
            Probe(
                metrics=("loss", "accuracy"),
                x=length,
                run=lambda model, length=length: self._score(model, length),  # type: ignore[misc]
                needs=lambda model, length=length: self._bytes(  # type: ignore[misc]
                    model, rows_a_call(length), length, training=False
                ),
            )
            for length in self.lengths
        ]
        self._probes.append(
            Probe(
                metrics=("seen",),
                x=settings.train_length,
                run=lambda model: self._scored_on(
                    model, self._seen, self._masked[:, : settings.train_length]
                )[:1],
            )
        )

    def build(self, encoding: str) -> MaskedLM:
        """A ``MaskedLM``; a learned table, if it has one, ends at the training length."""
        recipe, settings = plain_recipe(encoding), self._settings
        return MaskedLM(
            EncoderConfig(
                vocabulary=VOCABULARY,
                dim=settings.width,
                layers=settings.layers,
                heads=settings.heads,
                encoding=recipe.encoding,
                options=fitted_options(recipe, settings.train_length),
                max_length=settings.train_length,
                norm_first=True,
            )
        )

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``inputs``, ``targets`` and ``chosen``, all ``[batch, train_length]``."""
        settings, draw = self._settings, generator(seed, step)
        places = len(self._train) - settings.train_length
        begins = torch.randint(places, (settings.batch, 1), generator=draw)
        targets = self._train[begins + torch.arange(settings.train_length)].long()
        masked = mask_tokens(targets, mask_token=MASK, vocabulary=MASK, rate=RATE, generator=draw)
        return {"inputs": masked.inputs, "targets": targets, "chosen": masked.chosen}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the chosen bytes, in nats."""
        return token_loss(model(batch["inputs"]), batch["targets"], valid=batch["chosen"])

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        rows, length = self._settings.batch, self._settings.train_length
        needed = self._bytes(model, rows, length, training=True)
        require_step(needed, available, rows=rows, length=length)

    def count(self, encoding: str) -> int:
        """One measurement a length, and one of the text trained on."""
        return len(self._probes)

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """Loss and accuracy at every length."""
        return probed(self._probes, model, subject=encoding, seed=seed, available=available)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model; ``MaskedLM.load`` reads it."""
        cast(MaskedLM, model).save(folder)

    def _score(self, model: nn.Module, length: int) -> tuple[float, float]:
        begin = (self._windows.shape[1] - length) // 2
        part = slice(begin, begin + length)
        return self._scored_on(model, self._windows[:, part], self._masked[:, part])

    def _scored_on(self, model: nn.Module, windows: Tensor, masked: Tensor) -> tuple[float, float]:
        """Loss and accuracy of the masked bytes in the middle of windows."""
        device = next(model.parameters()).device
        first, scored = self._middle(windows.shape[1])
        chosen = masked.clone()
        chosen[:, :first] = chosen[:, first + scored :] = False
        bits, right = restored(
            lambda tokens: model(tokens.to(device)),
            windows.masked_fill(masked, MASK),
            windows,
            chosen,
        )
        return float(bits.nanmean()), float(right.double().nanmean())

    def _middle(self, length: int) -> tuple[int, int]:
        """First scored byte in windows of ``length``, and the number of scored bytes."""
        shortest, longest = self.lengths[0], self._windows.shape[1]
        scored = shortest // 2
        middle = (longest - shortest) // 2 + (shortest - scored) // 2
        return middle - (longest - length) // 2, scored

    def _bytes(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        return stack_bytes(
            cast(MaskedLM, model).encoder.config,
            layers=self._settings.layers,
            vocabulary=VOCABULARY,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            rows=rows,
            length=length,
            training=training,
        )

    def _metrics(self) -> tuple[Metric, ...]:
        scored = int(self._scored().sum())
        log_x = self.lengths[-1] > 2 * self.lengths[0]
        loss = Metric(
            key="loss",
            label="Loss on the same masked bytes",
            unit="bits per byte",
            axis="context length (bytes)",
            lower_is_better=True,
            chance=self._entropy,
            description=f"The same {scored:,} masked bytes at every length, in the middle of "
            "each window: a longer one only adds context on both sides. The rule is what a "
            "byte costs who knows only how frequent each is.",
            headline=True,
            log_x=log_x,
            learned=self._pair_entropy,
            rule="the byte before alone",
            overfit=OVERFIT,
        )
        return (
            loss,
            Metric(
                key="accuracy",
                label="Masked bytes restored",
                unit="share of masked bytes",
                axis="context length (bytes)",
                lower_is_better=False,
                chance=None,
                description="Share of these bytes that the model finds likeliest.",
                headline=False,
                log_x=log_x,
            ),
            Metric(
                key="training_loss",
                label="Training loss",
                unit="bits per byte",
                axis="training step",
                lower_is_better=True,
                chance=None,
                description="Mean over the steps since the point before; a tenth of the chosen "
                "bytes is shown as it is, and a tenth as another.",
                headline=False,
                log_x=False,
            ),
            seen(loss),
        )

    def _scored(self) -> Tensor:
        """Masked and scored bytes of the longest windows."""
        first, scored = self._middle(self._windows.shape[1])
        return self._masked[:, first : first + scored]


ENTRY = TaskEntry(
    make=MaskedBytes,
    summary="Restore masked bytes of real text from both sides, at longer contexts than trained on",
    data="posenc's own source, shipped, or a text of your own (--text)",
    metric="bits per byte on the same masked bytes at every length; share of them restored",
    expectation="Without positions a bidirectional encoder knows only which bytes are near: the "
    "control nope must stay close to the entropy of single bytes, far behind all others, which "
    "are close together (Haviv et al. 2022: perplexity 147 against 4.0 to 4.1). At longer contexts "
    "biases that fade with distance hold.",
    defaults=Defaults(
        encodings=("sinusoidal", "learned", "rope", "t5", "alibi", "kerple"),
        references=("nope",),
        train_length=64,
        test_lengths=times(1, 2, 4, 8),
        steps=800,
    ),
    length_unit="bytes",
    reads_text=True,
)
