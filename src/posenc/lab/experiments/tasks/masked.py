"""Masked bytes of real text, restored from both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from posenc.lab.experiments.corpus import Pieces, read_corpus
from posenc.lab.experiments.recipe import Recipe
from posenc.lab.experiments.tasks.common.needles import byte_losses, random_windows
from posenc.lab.experiments.tasks.common.task import Defaults, Task, TaskEntry, TaskSettings, times
from posenc.lab.experiments.text_loss import at_device, restored, rows_a_call
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.objectives import mask_tokens, token_loss
from posenc.lab.training.seeding import generator
from posenc.models import EncoderConfig, MaskedLM

MASK, VOCABULARY = 256, 257
RATE = 0.15

WINDOWS, TESTED_TOKENS = 512, 1 << 18
"""Windows scored at every length, and tokens at most of the longest ones."""


class MaskedBytes(Task):
    """Restore masked bytes of real text from both sides, at longer contexts than trained on.

    The same bytes are masked and scored at every length, those in the middle half of the shortest
    window: a longer one only adds context on both sides, masked at the same rate.

    Args:
        settings: of the comparison.

    Raises:
        DataError: if the text is unusable, or too short for the lengths.
    """

    training_unit = 1 / math.log(2)
    vocabulary = VOCABULARY

    def __init__(self, settings: TaskSettings) -> None:
        corpus = read_corpus(settings.text)
        length, longest = settings.train_length, settings.lengths[-1]
        corpus.require_size(4 * length, 4 * longest, longest=longest)
        self._train, self._pieces = Pieces.joined(corpus.train)
        windows = max(1, min(WINDOWS, TESTED_TOKENS // longest))
        self._windows = _spread(*Pieces.joined(corpus.held_out), windows, longest)
        self._training_windows = _spread(self._train, self._pieces, windows, length)
        self._masked = torch.rand(windows, longest, generator=generator(longest)) < RATE
        self._shortest = settings.lengths[0]
        super().__init__(
            settings,
            title="Masked bytes of real text, from both sides, at longer contexts than trained on",
            corpus=corpus.record(),
            metrics=self._metrics(),
            decisive=(corpus.sha256, length),
            example_length=length,
        )
        self.data = corpus.describe()
        for size in self.lengths:
            run = partial(self._score, length=size)
            self.add_probe(("loss", "accuracy"), size, run, rows=rows_a_call(size))
        self.add_probe(("seen",), length, self._score_training)

    def make_model(self, recipe: Recipe) -> MaskedLM:
        """A ``MaskedLM``; a learned table ends at the training length."""
        arguments = self.model_arguments(recipe)
        return MaskedLM(EncoderConfig(vocabulary=VOCABULARY, norm_first=True, **arguments))

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``inputs``, ``targets`` and ``chosen``, all ``[batch, train_length]``."""
        length, source = self.settings.train_length, generator(seed, step)
        rows = self.settings.batch
        targets = random_windows(self._train, self._pieces, rows=rows, length=length, source=source)
        masked = mask_tokens(targets, mask_token=MASK, vocabulary=MASK, rate=RATE, generator=source)
        return {"inputs": masked.inputs, "targets": targets, "chosen": masked.chosen}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the chosen bytes, in nats."""
        return token_loss(model(batch["inputs"]), batch["targets"], valid=batch["chosen"])

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Tokens that the loss averages over."""
        return int(batch["chosen"].sum())

    def stack_config(self, model: nn.Module) -> EncoderConfig:
        """Configuration of the encoder."""
        return cast(MaskedLM, model).encoder.config

    def _score(self, model: nn.Module, length: int) -> tuple[float, float]:
        begin = (self._windows.shape[1] - length) // 2
        part = slice(begin, begin + length)
        return self._score_middle(model, self._windows[:, part], self._masked[:, part])

    @property
    def _training_mask(self) -> Tensor:
        """Masked bytes of the windows trained on."""
        return self._masked[:, : self._training_windows.shape[1]]

    def _score_training(self, model: nn.Module) -> tuple[float]:
        return self._score_middle(model, self._training_windows, self._training_mask)[:1]

    def _score_middle(
        self, model: nn.Module, windows: Tensor, masked: Tensor
    ) -> tuple[float, float]:
        """Loss and accuracy of the masked bytes in the middle of windows."""
        bits, right = restored(
            at_device(model), windows.masked_fill(masked, MASK), windows, self._scored(masked)
        )
        return float(bits.nanmean()), float(right.double().nanmean())

    def _scored(self, masked: Tensor) -> Tensor:
        """Scored ones among the masked bytes of windows."""
        first, scored = self._middle(masked.shape[1])
        chosen = masked.clone()
        chosen[:, :first] = chosen[:, first + scored :] = False
        return chosen

    def _metrics(self) -> tuple[Metric, ...]:
        tested, trained = (
            (windows.flatten(), self._scored(masked).flatten().nonzero())
            for windows, masked in (
                (self._windows, self._masked),
                (self._training_windows, self._training_mask),
            )
        )
        loss, training, on_training = byte_losses(
            self._train,
            tested,
            trained,
            training="; a tenth of the chosen bytes is shown as it is, and a tenth as another.",
            label="Loss on the same masked bytes",
            axis="context length (bytes)",
            description=f"The same {len(tested[1]):,} masked bytes at every length, in the middle "
            "of each window: a longer one only adds context on both sides.",
        )
        accuracy = Metric(
            key="accuracy",
            label="Masked bytes restored",
            unit="share of masked bytes",
            axis=loss.axis,
            lower_is_better=False,
            description="Share of these bytes that the model finds likeliest.",
        )
        return loss, accuracy, training, on_training

    def _middle(self, length: int) -> tuple[int, int]:
        """First scored byte in windows of ``length``, and the number of scored bytes."""
        longest, scored = self._windows.shape[1], self._shortest // 2
        middle = (longest - self._shortest) // 2 + (self._shortest - scored) // 2
        return middle - (longest - length) // 2, scored


def _spread(text: Tensor, pieces: Pieces, count: int, length: int) -> Tensor:
    """Windows ``[count, length]``, evenly over a text."""
    numbers = torch.arange(count) * (pieces.count(length) - 1) // count
    begins = pieces.begins(numbers, length)
    return text[begins.unsqueeze(1) + torch.arange(length)].long()


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
