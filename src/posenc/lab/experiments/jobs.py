"""One run of a comparison: train, measure, write."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.errors import Interrupted, OutputError
from posenc.lab.codec import restore, to_plain
from posenc.lab.experiments.progress import Event, Measuring, RunStarted, Stepped
from posenc.lab.experiments.results import Measurement, RefusedMeasurement, TrainedRun
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks import Task
from posenc.lab.training.checkpoint import CHECKPOINT, TrainingPlan
from posenc.lab.training.loop import Trained, Watch, train
from posenc.lab.training.machine import available_memory
from posenc.storage import read_json, unwritable, write_json

CURVE_POINTS = 60
"""Points of a training curve."""

EMIT_SECONDS = 0.25

Item = Measurement | RefusedMeasurement

PACE_STEPS = 8

OUTCOME = "run.json"

SAVING = ".model-"
"""Prefix of the folder in which a model is saved, removed with it."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The run of ``encoding`` with ``seed``, of ``steps``, in ``folder``."""

    encoding: str
    seed: int
    steps: int
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A few steps of a run to measure its speed; if ``measured``, also the time of measuring."""

    encoding: str
    measured: bool


@dataclass(frozen=True)
class Prepare:
    """The data of the task, to measure how long it takes to prepare."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Records of a finished run."""

    runs: tuple[TrainedRun, ...]
    measurements: tuple[Measurement, ...]
    refusals: tuple[RefusedMeasurement, ...]

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read a record in JSON; CheckpointError if it is damaged."""
        remedy = "Delete it and continue with --resume: the run is done again."
        plain = read_json(path, remedy=remedy)
        return restore(cls, plain, str(path), expected="the outcome of a run", remedy=remedy)


def plan(
    settings: ComparisonSettings, encoding: str, *, seed: int, steps: int, folder: Path
) -> TrainingPlan:
    """Training plan of a run, from the settings."""
    return TrainingPlan(
        encoding=encoding,
        seed=seed,
        steps=steps,
        rate=settings.rate,
        device=settings.device,
        precision=settings.precision,
        folder=folder,
    )


def carry_out(
    job: TrainingJob,
    task: Task,
    settings: ComparisonSettings,
    *,
    workers: int,
    stop: Callable[[], bool],
    emit: Callable[[Event], None],
) -> None:
    """Train (or continue), measure, and write the outcome; then drop the training state.

    Nothing is written if the job's folder is gone, because another process has taken it over.

    Raises:
        Interrupted: after ``stop`` said so; what was trained is saved.
        CheckpointError, OutputError: as ``train``.
    """
    planned = plan(settings, job.encoding, seed=job.seed, steps=job.steps, folder=job.folder)
    trained = train(task, planned, _watch(job, stop, emit))
    names = [v.name for v in settings.variants if v.encoding == job.encoding]
    items: list[Item] = []
    if job.encoding in names:
        items += _curve(job, task, trained)
    if trained.diverged is None:
        available = available_memory(torch.device(settings.device))
        share = None if available is None else available // workers
        items += _measure(job, task, trained, share, stop, emit)
    else:
        items += _diverged(job, task, names, trained.diverged)
    items = [_finite(item) for item in items]
    _save_model(job, task, trained)
    outcome = Outcome(
        runs=tuple(_run(job, trained, name) for name in names),
        measurements=tuple(item for item in items if isinstance(item, Measurement)),
        refusals=tuple(item for item in items if isinstance(item, RefusedMeasurement)),
    )
    write_json(job.folder / OUTCOME, to_plain(outcome))
    drop_state(job.folder)


def drop_state(folder: Path) -> None:
    """Delete the training state in the folder of a finished run."""
    for leftover in (folder / CHECKPOINT, *folder.glob(".*.partial")):
        leftover.unlink(missing_ok=True)


def pace(
    order: Pace, task: Task, settings: ComparisonSettings, folder: Path, stop: Callable[[], bool]
) -> tuple[float, float]:
    """Seconds that a training step takes, and that measuring takes (0 where it is not tried).

    Raises:
        Interrupted: after ``stop`` said so.
    """
    planned = plan(settings, order.encoding, seed=0, steps=PACE_STEPS, folder=folder)
    marks: list[float] = []  # the first step, which also allocates, ends at the first

    def stepped(step: int, loss: Tensor, speed: float) -> None:
        marks.append(time.perf_counter())

    trained = train(task, planned, Watch(stop=stop, stepped=stepped))
    seconds = (marks[-1] - marks[0]) / (len(marks) - 1)
    if not order.measured:
        return seconds, 0.0
    began = time.perf_counter()
    deque(task.measure(trained.model, order.encoding, 0, available=None), maxlen=0)
    return seconds, time.perf_counter() - began


def _save_model(job: TrainingJob, task: Task, trained: Trained) -> None:
    """Save the model beside the job's folder, then move it in if that is still there."""
    model = job.folder / "model"
    try:
        with tempfile.TemporaryDirectory(dir=job.folder.parent, prefix=SAVING) as scratch:
            task.save(trained.model, Path(scratch) / "model")
            shutil.rmtree(model, ignore_errors=True)
            (Path(scratch) / "model").rename(model)
    except OutputError:
        raise
    except OSError as error:
        raise unwritable(model, error) from error


def _watch(job: TrainingJob, stop: Callable[[], bool], emit: Callable[[Event], None]) -> Watch:
    run: dict[str, Any] = {"encoding": job.encoding, "seed": job.seed}
    last = 0.0

    def stepped(step: int, loss: Tensor, speed: float) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= EMIT_SECONDS or step == job.steps:
            last = now
            value = float(loss)
            emit(Stepped(step=step, steps=job.steps, loss=value, tokens_per_second=speed, **run))

    return Watch(
        stop=stop,
        started=lambda step: emit(RunStarted(step=step, steps=job.steps, **run)),
        stepped=stepped,
    )


def _measure(
    job: TrainingJob,
    task: Task,
    trained: Trained,
    available: int | None,
    stop: Callable[[], bool],
    emit: Callable[[Event], None],
) -> list[Item]:
    total = task.count(job.encoding)
    items: list[Item] = []
    pieces = task.measure(trained.model, job.encoding, job.seed, available=available)
    for done, piece in enumerate(pieces, start=1):
        items += piece
        subject = piece[0].subject
        emit(
            Measuring(encoding=job.encoding, seed=job.seed, subject=subject, done=done, total=total)
        )
        if done < total and stop():
            raise Interrupted(
                "measuring",
                expected=f"{total} measurements of {job.encoding}, seed {job.seed}",
                got=f"a stop after {done}",
                remedy="The trained model is saved: resume to measure it.",
            )
    return items


def _run(job: TrainingJob, trained: Trained, subject: str) -> TrainedRun:
    return TrainedRun(
        subject=subject,
        seed=job.seed,
        steps=job.steps,
        parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        tokens_per_second=trained.tokens_per_second,
        peak_memory_bytes=trained.peak_memory_bytes,
        train_seconds=trained.seconds,
    )


def _curve(job: TrainingJob, task: Task, trained: Trained) -> list[Item]:
    """The training loss, as means over equal parts."""
    size = max(1, -(-job.steps // CURVE_POINTS))
    points: list[Item] = []
    for begin in range(0, job.steps, size):
        part = trained.losses[begin : begin + size]
        if trained.diverged is not None and begin + len(part) > trained.diverged:
            break
        points.append(
            Measurement(
                subject=job.encoding,
                seed=job.seed,
                metric="training_loss",
                x=begin + len(part),
                value=float(part.mean()) * task.training_unit,
            )
        )
    return points


def _diverged(job: TrainingJob, task: Task, names: Iterable[str], step: int) -> list[Item]:
    reason = (
        f"training of seed {job.seed} diverged at step {step + 1}: its loss or weights were no "
        "longer finite (a lower learning rate may help)"
    )
    return [
        RefusedMeasurement(subject=name, metric=metric.key, x=x, reason=reason)
        for name in names
        for metric in task.metrics
        if metric.key != "training_loss"
        for x in task.lengths
    ]


def _finite(item: Item) -> Item:
    """The item; a refusal in place of a value that is not finite, which JSON cannot hold."""
    if isinstance(item, RefusedMeasurement) or math.isfinite(item.value):
        return item
    reason = f"the model of seed {item.seed} gives {item.value}"
    return RefusedMeasurement(subject=item.subject, metric=item.metric, x=item.x, reason=reason)
