"""A small RoPE language model to stretch, where there is no checkpoint at hand."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from posenc.lab.checkpoint import Plan
from posenc.lab.seeding import fingerprint, generator
from posenc.lab.settings import Settings
from posenc.lab.stretching.probes import repeat
from posenc.lab.tasks.language import LanguageModelling
from posenc.lab.train import Watch, train
from posenc.models import Decoder

__all__ = ["SUBJECT_STEPS", "train_subject"]

SUBJECT_STEPS = 1800
"""About three minutes on two cores."""

LENGTH, WIDTH, LAYERS, HEADS, BATCH = 128, 96, 3, 4, 16

REPEATED_ROWS = 2
"""Rows of a batch that end in a random word over and over, so that there is something to copy."""


class SubjectTask(LanguageModelling):
    """The lab's language task, with some rows that ask for copying."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.fingerprint = fingerprint(self.fingerprint, REPEATED_ROWS)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        batch = super().batch(seed, step)
        inputs, targets = batch["inputs"], batch["targets"]
        whole = torch.cat([inputs[-REPEATED_ROWS:], targets[-REPEATED_ROWS:, -1:]], dim=1)
        whole = repeat(whole, generator(seed, step, REPEATED_ROWS))
        inputs[-REPEATED_ROWS:], targets[-REPEATED_ROWS:] = whole[:, :-1], whole[:, 1:]
        return batch


def train_subject(
    work: Path,
    *,
    text: Path | None = None,
    length: int = LENGTH,
    steps: int = SUBJECT_STEPS,
    seed: int = 0,
    watch: Watch | None = None,
) -> Decoder:
    """Train a byte-level RoPE model of about 0.4 M parameters, at 128 bytes as a rule; resumable.

    A quarter of the rows ask for needles, and an eighth repeat a random word, so that a stretched
    model can be asked for both.

    Args:
        work: an existing folder for the training's checkpoint.
        text: what to train on; the standard library's source by default.
        length: of the contexts, in bytes; a batch has as many bytes whatever it is.
        steps: of training.
        seed: of weights and data.
        watch: how to follow it.

    Raises:
        DataError: when the text is unusable.
        Interrupted: after ``watch.stop`` said so; it is saved.
        CheckpointError, OutputError: as ``posenc.lab.train.train``.
    """
    settings = Settings(
        out=work,
        text=text,
        encodings=("rope",),
        references=(),
        train_length=length,
        test_lengths=(length,),
        steps=steps,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        batch=max(2 * REPEATED_ROWS, BATCH * LENGTH // length),
    )
    plan = Plan(encoding="rope", seed=seed, steps=steps, rate=settings.rate, folder=work)
    trained = train(SubjectTask(settings), plan, watch)
    return cast(Decoder, trained.model)
