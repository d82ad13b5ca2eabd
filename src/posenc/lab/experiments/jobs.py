"""One run of a comparison: train, measure, write."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.errors import Interrupted
from posenc.lab.codec import restore, to_plain
from posenc.lab.experiments.progress import Event, Measuring, RunStarted, Stepped
from posenc.lab.experiments.results import Measurement, RefusedMeasurement, TrainedRun
from posenc.lab.experiments.settings import RUNS, ComparisonSettings, Record, locked, stop_file
from posenc.lab.experiments.tasks import Task
from posenc.lab.training.checkpoint import CHECKPOINT, TrainingPlan
from posenc.lab.training.loop import CONTROL, Trained, Watch, train
from posenc.lab.training.machine import available_memory, cores
from posenc.storage import make_folder, read_json, write_json

CURVE_POINTS = 60
"""Points of a training curve."""

EMIT_SECONDS = 0.25

Item = Measurement | RefusedMeasurement

PACE_STEPS = 8

OUTCOME = "run.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepare:
    """Prepares the data of a comparison, to measure how long it takes."""

    settings: ComparisonSettings

    def __str__(self) -> str:
        return "the preparation of the data"

    def carry_out(self, emit: Callable[[Event], None]) -> float:
        """Prepare it; the seconds that it took."""
        began = time.perf_counter()
        self.settings.entry.make(self.settings)
        return time.perf_counter() - began


@dataclass(frozen=True, eq=False, kw_only=True)
class Pace:
    """A few steps of a run to measure its speed; if ``measured``, also the time of measuring."""

    settings: ComparisonSettings
    encoding: str
    measured: bool

    def __str__(self) -> str:
        return f"a few steps of {self.encoding}"

    def carry_out(self, emit: Callable[[Event], None]) -> tuple[float, float]:
        """Seconds that a training step takes, and that measuring takes (0 where it is not tried).

        Raises:
            Interrupted: when the comparison is to stop.
        """
        task = prepared(self.settings)
        planned = plan(self.settings, self.encoding, seed=0, steps=PACE_STEPS, folder=None)
        marks: list[float] = []  # the first step, which also allocates, ends at the first

        def stepped(step: int, loss: Tensor, speed: float) -> None:
            marks.append(time.perf_counter())

        stop = stop_file(self.settings.out).exists
        trained = train(task, planned, Watch(stop=stop, stepped=stepped))
        seconds = (marks[-1] - marks[0]) / (len(marks) - 1)
        if not self.measured:
            return seconds, 0.0
        began = time.perf_counter()
        deque(task.measure(trained.model, self.encoding, 0, available=None), maxlen=0)
        return seconds, time.perf_counter() - began


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingJob:
    """The run of ``encoding`` with ``seed``, in a folder of the comparison's.

    Args:
        settings: of the comparison.
        encoding, seed: of the run.
        sharing: number of jobs that share the memory of the machine; None: one per core.
    """

    settings: ComparisonSettings
    encoding: str
    seed: int
    sharing: int | None = None

    def __str__(self) -> str:
        return f"the run of {self.encoding}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Training steps."""
        return self.settings.planned_steps

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.settings.out / RUNS / self.encoding / f"seed-{self.seed}"

    def carry_out(self, emit: Callable[[Event], None]) -> tuple[Outcome, float]:
        """Train (or continue), measure and write the run, unless it is finished.

        A file lock keeps out another job of this run: a cluster's that outlived its caller, or one
        on a machine that was taken for dead.

        Returns:
            The outcome, and the seconds that it took.

        Raises:
            Interrupted: when the comparison is to stop; what was trained is saved.
            ArgumentError, DataError: when another comparison has replaced this one.
            CheckpointError, OutputError: as ``train``.
        """
        began = time.perf_counter()
        stop = stop_file(self.settings.out).exists
        task = prepared(self.settings)
        make_folder(self.folder)
        with locked(self.folder.with_name(f".{self.folder.name}.lock"), stop=stop):
            Record(settings=self.settings, fingerprint=task.fingerprint).require_unchanged()
            if (path := self.folder / OUTCOME).exists():
                outcome = Outcome.read(path)
            else:
                outcome = train_and_measure(self, task, stop=stop, emit=emit)
            self.drop_state()
        return outcome, time.perf_counter() - began

    def drop_state(self) -> None:
        """Delete the training state of the finished run."""
        for leftover in (self.folder / CHECKPOINT, *self.folder.glob(".*.partial")):
            leftover.unlink(missing_ok=True)


Job = Prepare | Pace | TrainingJob

_prepared: dict[str, Task] = {}
"""The task of the comparison that this process works on, by its settings."""


def prepared(settings: ComparisonSettings) -> Task:
    """The task of a comparison, made once a process."""
    key = repr(replace(settings, steps=None, minutes=None))
    if key not in _prepared:
        _prepared.clear()
        task = settings.entry.make(settings)
        # Libraries allocate what they keep, which is no run's memory.
        train(task, plan(settings, CONTROL, seed=0, steps=1, folder=None))
        _prepared[key] = task
    return _prepared[key]


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
    settings: ComparisonSettings, encoding: str, *, seed: int, steps: int, folder: Path | None
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


def train_and_measure(
    job: TrainingJob, task: Task, *, stop: Callable[[], bool], emit: Callable[[Event], None]
) -> Outcome:
    """Train (or continue), measure, and write the outcome.

    Raises:
        Interrupted: after ``stop`` said so; what was trained is saved.
        CheckpointError, OutputError: as ``train``.
    """
    settings = job.settings
    planned = plan(settings, job.encoding, seed=job.seed, steps=job.steps, folder=job.folder)
    trained = train(task, planned, _watch(job, stop, emit))
    names = [v.name for v in settings.variants if v.encoding == job.encoding]
    items: list[Item] = []
    if job.encoding in names:
        items += _curve(job, task, trained)
    if trained.diverged is None:
        available = available_memory(torch.device(settings.device))
        sharing = job.sharing or max(1, cores() // settings.threads)
        share = None if available is None else available // sharing
        items += _measure(job, task, trained, share, stop, emit)
    else:
        items += _diverged(job, task, names, trained.diverged)
    items = [_finite(item) for item in items]
    model = job.folder / "model"
    shutil.rmtree(model, ignore_errors=True)  # of a process that died while it saved
    task.save(trained.model, model)
    outcome = Outcome(
        runs=tuple(_run(job, trained, name) for name in names),
        measurements=tuple(item for item in items if isinstance(item, Measurement)),
        refusals=tuple(item for item in items if isinstance(item, RefusedMeasurement)),
    )
    write_json(job.folder / OUTCOME, to_plain(outcome))
    return outcome


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
