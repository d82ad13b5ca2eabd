"""A comparison of encodings, from settings to results."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from posenc.errors import ArgumentError, CheckpointError, PosencError
from posenc.lab.experiments.jobs import (
    OUTCOME,
    SAVING,
    Outcome,
    Pace,
    Prepare,
    TrainingJob,
    drop_state,
)
from posenc.lab.experiments.locks import RunLocks, make_folders, with_idle_paths
from posenc.lab.experiments.progress import (
    Finished,
    Paced,
    Progress,
    RunFinished,
    RunsPrepared,
    Stopping,
)
from posenc.lab.experiments.results import Comparison, Provenance
from posenc.lab.experiments.settings import (
    NOT_ABOUT_RESULTS,
    RUNS,
    ComparisonSettings,
    open_folder,
    resume_command,
)
from posenc.lab.experiments.tasks import Task
from posenc.lab.experiments.workers import Done, WorkerPool
from posenc.lab.training.machine import available_memory, cores, describe_device, versions
from posenc.lab.training.stopping import Deadline, interruptible

RESERVE = 1.25
"""Budgeted time is divided by this: measured speed varies, and the budget ends the training."""

RAISE = "Raise it, or compare fewer encodings, seeds or lengths."
RESUME = f"{RAISE} To go on in the same folder, add --resume."

LEAST_STEPS, STEPS_MULTIPLE = 20, 10

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two looks for an unfinished run; the pause doubles while there is none."""


def compare(
    settings: ComparisonSettings,
    *,
    command: str | None = None,
    progress: Progress | None = None,
    interim: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Train every encoding with every seed, test each, and return what was found.

    The runs are carried out by worker processes (so a script that calls this needs the usual
    ``if __name__ == "__main__":``), and written to ``settings.out`` as they finish. Any number of
    calls, on any machines that see that folder, share its runs (``existing="join"``): each run is
    locked by one of them, and if that one dies, continued by another. After a
    Ctrl-C, or when ``settings.budget_minutes`` are over, the workers finish their step and save,
    and what is finished is returned, with ``complete=False``; a second Ctrl-C raises
    KeyboardInterrupt at once.

    Args:
        settings: what to do.
        command: the command line, for the record.
        progress: receives the events of ``posenc.lab.experiments.progress``.
        interim: receives the results so far after each finished run but the last.

    Raises:
        ArgumentError: when an encoding cannot serve it, a training step does not fit into memory,
            the budget is too small, or other settings are to be resumed.
        DataError: when the text is unusable, or not the one to be resumed with.
        OutputError: when the output folder is in use, read-only or full.
        CheckpointError: when a file that is needed to resume is damaged.
    """
    began = time.perf_counter()
    session = _Session(settings, progress or (lambda event: None), interim, command)
    with interruptible() as stop:
        session.work(stop, began)
    comparison = session.collect()
    session.emit(
        Finished(
            complete=comparison.complete,
            finished=len(session.finished),
            runs=len(session.runs),
            seconds=time.perf_counter() - began,
            resume=None if comparison.complete else resume_command(settings.out),
        )
    )
    return comparison


def prepare(settings: ComparisonSettings) -> None:
    """Make the folder of a comparison, or check that it can be continued; no run is begun.

    Raises:
        ArgumentError, DataError, OutputError, CheckpointError: as ``compare``.
    """
    _Session(settings, lambda event: None, None, None)


class _Session:
    """One call of ``compare``."""

    def __init__(
        self,
        settings: ComparisonSettings,
        emit: Progress,
        interim: Callable[[Comparison], None] | None,
        command: str | None,
    ) -> None:
        self.emit, self.interim, self.command = emit, interim, command
        self.deadline = Deadline(settings.budget_minutes)
        self.task = _make_task(settings, self.deadline)
        self.record = open_folder(settings, self.task.fingerprint)
        self.settings = self.record.settings
        self.runs = [(name, seed) for seed in settings.seeds for name in settings.trained]
        make_folders([self._folder(run) for run in self.runs], settings.out / RUNS)
        if self.settings.steps is None and self.settings.budget_minutes is None:
            self._decide(self.settings.planned_steps)
        self.finished: dict[tuple[str, int], Outcome] = {}
        self.finished = self._read_new()
        self.took: dict[tuple[str, int], float] = {}
        self.workers = _count_workers(settings, len(self.runs) - len(self.finished))
        emit(
            RunsPrepared(
                task=settings.task,
                title=self.task.title,
                data=self.task.data,
                runs=tuple(self.runs),
                finished=len(self.finished),
                workers=self.workers,
                out=settings.out,
            )
        )

    def work(self, stop: Callable[[], bool], began: float) -> None:
        """Do what is left to do, with others that do the same, unless it is cut short."""
        left = [run for run in self.runs if run not in self.finished]
        if left:
            self._carry_out(left, stop, began)
        if len(self.finished) == len(self.runs):
            for leftover in (self.settings.out / RUNS).glob(f"*/{SAVING}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _carry_out(
        self, left: list[tuple[str, int]], stop: Callable[[], bool], began: float
    ) -> None:
        try:
            with RunLocks() as locks, WorkerPool(self.settings, self.workers) as pool:
                if self.settings.steps is None and not self._pace(pool, left, stop, began):
                    return
                pool.run(
                    self._orders(locks),
                    done=partial(self._done, locks),
                    not_applicable=lambda order: (
                        isinstance(order, TrainingJob) and locks.lost(order.folder)
                    ),
                    **self._callbacks(lambda: stop() or self.deadline.left <= 0),
                )
        except PosencError as error:
            raise with_idle_paths(error) from error

    def collect(self) -> Comparison:
        """Records of the finished runs."""
        settings, task = self.settings, self.task
        outcomes = [self.finished[run] for run in self.runs if run in self.finished]
        refusals = dict.fromkeys(item for outcome in outcomes for item in outcome.refusals)
        plain = settings.to_json()
        return Comparison(
            task=settings.task,
            title=task.title,
            train_length=task.lengths[0],
            test_lengths=task.lengths,
            metrics=task.metrics,
            subjects=task.subjects,
            runs=tuple(item for outcome in outcomes for item in outcome.runs),
            measurements=tuple(item for outcome in outcomes for item in outcome.measurements),
            refusals=tuple(refusals),
            provenance=Provenance(
                command=self.command or f"posenc.lab.experiments.compare({settings!r})",
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                versions=versions(),
                device=describe_device(torch.device(settings.device)),
                threads=settings.threads,
                seeds=tuple(settings.seeds),
                corpus=task.corpus,
                settings={k: v for k, v in plain.items() if k not in NOT_ABOUT_RESULTS},
            ),
            complete=len(outcomes) == len(self.runs),
            expectation=settings.entry.expectation,
            length_unit=settings.entry.length_unit,
        )

    def _pace(
        self, pool: WorkerPool, left: list[tuple[str, int]], stop: Callable[[], bool], began: float
    ) -> bool:
        """Turn the budget into steps; False if it was cut short."""
        budget = self.settings.budget_minutes
        assert budget is not None  # steps are undecided for no other reason
        names = list(dict.fromkeys(name for name, _ in left))
        paced: dict[str, tuple[float, float]] = {}

        def done(message: Done) -> None:
            assert isinstance(message.order, Pace)  # no other was given
            assert message.paced is not None
            paced[message.order.encoding] = message.paced

        def stopped() -> bool:
            self.deadline.require("the speed of training is measured", RESUME)
            return stop()

        orders = [Pace(encoding=name, measured=name == names[0]) for name in names]
        pool.run(orders, done=done, **self._callbacks(stopped))
        if len(paced) < len(names):
            return False
        pieces = self.task.count(names[0])
        measuring = paced[names[0]][1] / pieces * sum(self.task.count(name) for name, _ in left)
        a_step = sum(paced[name][0] for name, _ in left)
        spent = time.perf_counter() - began
        seconds = (60 * budget - spent) / RESERVE * self.workers - measuring
        steps = int(seconds / a_step) // STEPS_MULTIPLE * STEPS_MULTIPLE
        least = spent + RESERVE * (measuring + LEAST_STEPS * a_step) / self.workers
        if steps < LEAST_STEPS:
            raise ArgumentError(
                "budget_minutes",
                expected=f"at least {least / 60:.1f} on this machine",
                got=budget,
                remedy=RESUME,
            )
        self._decide(steps)
        expected = spent + RESERVE * (measuring + steps * a_step) / self.workers
        self.emit(Paced(steps=steps, seconds=expected))
        return True

    def _decide(self, steps: int) -> None:
        self.settings = replace(self.settings, steps=steps, budget_minutes=None)
        self.record = replace(self.record, settings=self.settings)
        self.record.write()

    def _folder(self, run: tuple[str, int]) -> Path:
        encoding, seed = run
        return self.settings.out / RUNS / encoding / f"seed-{seed}"

    def _orders(self, locks: RunLocks) -> Iterator[TrainingJob | None]:
        """Claimed runs; None while other processes hold all that are left."""
        pause = FIRST_PAUSE
        while self._look() < len(self.runs):
            job = self._acquire(locks)
            if job is None:
                until = time.monotonic() + pause
                while time.monotonic() < until:
                    yield None
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                yield job
                pause = FIRST_PAUSE

    def _acquire(self, locks: RunLocks) -> TrainingJob | None:
        """The first unfinished run that no process holds, locked."""
        for encoding, seed in self.runs:
            if (encoding, seed) in self.finished:
                continue
            folder = locks.acquire(self._folder((encoding, seed)))
            if folder is None:
                continue
            self.record.require_unchanged()
            if not (folder / OUTCOME).exists():
                steps = self.settings.planned_steps
                return TrainingJob(encoding=encoding, seed=seed, steps=steps, folder=folder)
            drop_state(folder)  # its owner died just before it returned the folder
            locks.release(folder)
        return None

    def _done(self, locks: RunLocks, message: Done) -> None:
        order = message.order
        assert isinstance(order, TrainingJob)  # no other was given
        if locks.release(order.folder):
            self.took[order.encoding, order.seed] = message.took
            self._look()

    def _look(self) -> int:
        """Report runs that have newly finished, here or elsewhere; the number of finished ones."""
        new = self._read_new()
        if new:
            self.record.require_unchanged()
        for number, (run, outcome) in enumerate(new.items(), start=len(self.finished) + 1):
            self.finished[run] = outcome
            trained = sum(record.train_seconds for record in outcome.runs[:1])
            self.emit(
                RunFinished(
                    encoding=run[0],
                    seed=run[1],
                    finished=number,
                    runs=len(self.runs),
                    seconds=self.took.get(run, trained),
                )
            )
        if new and self.interim is not None and len(self.finished) < len(self.runs):
            self.interim(self.collect())
        return len(self.finished)

    def _read_new(self) -> dict[tuple[str, int], Outcome]:
        """Outcomes that have not been read yet."""
        new = {}
        for run in self.runs:
            path = self._folder(run) / OUTCOME
            if run not in self.finished and path.exists():
                try:
                    new[run] = Outcome.read(path)
                except CheckpointError:
                    if path.exists():  # else another process has just locked its folder
                        raise
        return new

    def _callbacks(self, stop: Callable[[], bool]) -> dict[str, Any]:
        def stopping() -> None:
            resume = resume_command(self.settings.out)
            self.emit(Stopping(resume=resume, over_budget=self.deadline.left <= 0))

        return {"stop": stop, "stopping": stopping, "emit": self.emit}


def _make_task(settings: ComparisonSettings, deadline: Deadline) -> Task:
    """The task, after a try whether every encoding can serve it and a step fits into memory."""
    if settings.budget_minutes is not None:
        _try_preparing(settings, deadline)
    task = settings.entry.make(settings)
    device = torch.device(settings.device)
    free = available_memory(device)
    for name in settings.trained:
        deadline.require("models are made", RAISE)
        with torch.random.fork_rng(devices=[]):
            model = task.build(name)
        if free is not None:
            task.require_memory(model, free // _count_workers(settings, len(settings.trained)))
    return task


def _try_preparing(settings: ComparisonSettings, deadline: Deadline) -> None:
    """Prepare the data in another process first, which can be ended with the budget."""
    took: list[float] = []

    def stop() -> bool:
        deadline.require("the data is prepared", RAISE)
        return False

    with WorkerPool(settings, 1) as pool:
        pool.run(
            [Prepare()],
            stop=stop,
            stopping=lambda: None,
            emit=lambda event: None,
            done=lambda message: took.append(message.took),
        )
    deadline.require("the data is prepared", RAISE, seconds=took[0])


def _count_workers(settings: ComparisonSettings, runs: int) -> int:
    """The number of processes in the settings; by default enough to keep all cores busy."""
    by_cores = cores() // settings.threads if settings.device == "cpu" else 1
    return max(1, min(settings.workers or by_cores, runs))
