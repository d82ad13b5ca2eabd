"""A small RoPE language model, to be extended where no checkpoint is given."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from posenc.lab.evaluation.checkpoint import as_llama
from posenc.lab.evaluation.progress import Progress, kept, silent
from posenc.lab.evaluation.suites.needles import repeat
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks.language import LanguageModelling
from posenc.lab.folders import output_folder, require_unused
from posenc.lab.training.checkpoint import TrainingPlan
from posenc.lab.training.loop import Watch, train
from posenc.lab.training.seeding import fingerprint, generator
from posenc.models import Decoder
from posenc.storage import make_folder
from posenc.transformers.kinds import require_transformers

DEMO_STEPS = 1800
"""About three minutes on two cores."""

LENGTH, WIDTH, LAYERS, HEADS, BATCH = 128, 96, 3, 4, 16


@dataclass(frozen=True)
class Repetition:
    """Rows of a batch that repeat a random word, so that copying is learned.

    Args:
        rows: their number.
        latest: share of the row in which the repetition begins.
    """

    rows: int = 4
    latest: float = 0.25


def demo_checkpoint(
    folder: Path,
    *,
    text: Path | None,
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
    command: str = "",
) -> Path:
    """The checkpoint folder of the small model, trained if missing; resumable.

    Args:
        folder: of the checkpoint; the state of the training is kept beside it.
        text: to train on; the shipped one by default.
        progress, stop: called after each training step; see ``extend_checkpoint``.
        command: the calling command, for messages.

    Raises: as ``train_demo_model``; CheckpointError without transformers.
    """
    if (folder / "config.json").exists():
        return folder
    require_unused(folder)
    require_transformers(str(folder))
    work = folder.with_name(f"{folder.name}-training")
    make_folder(work)
    with kept(work, command):
        model = train_demo_model(
            work,
            text=text,
            watch=Watch(
                stop=stop,
                stepped=lambda step, loss, speed: progress(
                    f"training a small model, step {step}, loss {float(loss):.3f}", step, DEMO_STEPS
                ),
            ),
        )
    with output_folder(folder, "folder") as partial:
        as_llama(model).save_pretrained(partial)
    shutil.rmtree(work, ignore_errors=True)
    return folder


class DemoTask(LanguageModelling):
    """Language modelling, with some rows that ask for copying."""

    def __init__(self, settings: ComparisonSettings, repetition: Repetition) -> None:
        super().__init__(settings)
        self._repetition = repetition
        self.fingerprint = fingerprint(self.fingerprint, repetition.rows, repetition.latest)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        batch = super().batch(seed, step)
        inputs, targets = batch["inputs"], batch["targets"]
        last = slice(len(inputs) - self._repetition.rows, None)
        whole = torch.cat([inputs[last], targets[last, -1:]], dim=1)
        draw = generator(seed, step, self._repetition.rows)
        whole = repeat(whole, draw, latest=self._repetition.latest)
        inputs[last], targets[last] = whole[:, :-1], whole[:, 1:]
        return batch


def train_demo_model(
    work: Path,
    *,
    text: Path | None = None,
    length: int = LENGTH,
    steps: int = DEMO_STEPS,
    seed: int = 0,
    repetition: Repetition | None = None,
    watch: Watch | None = None,
) -> Decoder:
    """Train a byte-level RoPE model of about 0.4 M parameters; resumable.

    A quarter of the rows ask for needles, and another repeats a random word.

    Args:
        work: an existing folder for the training's checkpoint.
        text: to train on; the shipped one by default.
        length: of contexts in bytes; a batch has the same number of bytes for any.
        steps: of training.
        seed: of weights and data.
        repetition: rows to copy from; ``Repetition()`` by default.
        watch: callbacks of the training.

    Raises:
        DataError: if the text is unusable.
        Interrupted: on ``watch.stop``, after saving.
        CheckpointError, OutputError: as ``posenc.lab.training.loop.train``.
    """
    settings = ComparisonSettings(
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
        batch=max(1, BATCH * LENGTH // length),
    )
    plan = TrainingPlan(encoding="rope", seed=seed, steps=steps, rate=settings.rate, folder=work)
    trained = train(DemoTask(settings, repetition or Repetition()), plan, watch)
    return cast(Decoder, trained.model)
