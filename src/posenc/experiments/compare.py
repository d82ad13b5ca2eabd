"""A comparison of encodings, from settings to results."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from posenc.errors import ArgumentError
from posenc.experiments.jobs import Outcome, Pace, TrainingJob
from posenc.experiments.output import Record, open_folder, resume_command
from posenc.experiments.progress import (
    Finished,
    Paced,
    Progress,
    RunFinished,
    RunsPrepared,
    Stopping,
)
from posenc.experiments.results import Comparison, Provenance
from posenc.experiments.settings import NOT_ABOUT_RESULTS, ComparisonSettings
from posenc.experiments.tasks import Task
from posenc.experiments.workers import Crew, Done
from posenc.training.interrupt import interruptible
from posenc.training.machine import available_memory, cores, describe_device, platform_name

RESERVE = 1.1
"""Budgeted time is divided by this: measured speed varies by some percent."""

LEAST_STEPS, STEPS_MULTIPLE = 20, 10


def compare(
    settings: ComparisonSettings, *, command: str | None = None, progress: Progress | None = None
) -> Comparison:
    """Train every encoding with every seed, test each, and return what was found.

    The runs are carried out by worker processes (so a script that calls this needs the usual
    ``if __name__ == "__main__":``), and written to ``settings.out`` as they finish. After a
    Ctrl-C the workers finish their step and save, and what is finished is returned, with
    ``complete=False``; a second Ctrl-C raises KeyboardInterrupt at once.

    Args:
        settings: what to do.
        command: the command line, for the record.
        progress: receives the events of ``posenc.experiments.progress``.

    Raises:
        ArgumentError: when an encoding cannot serve it, a training step does not fit into memory,
            the budget is too small, or other settings are to be resumed.
        DataError: when the text is unusable, or not the one to be resumed with.
        OutputError: when the output folder is in use, read-only or full.
        CheckpointError: when a file that is needed to resume is damaged.
    """
    began = time.perf_counter()
    session = _Session(settings, progress or (lambda event: None))
    with interruptible() as stop:
        complete = session.work(stop, began)
    comparison = session.collect(command)
    session.tell(
        Finished(
            complete=complete,
            finished=len(session.finished),
            runs=len(session.runs),
            seconds=time.perf_counter() - began,
            resume=None if complete else resume_command(settings.out),
        )
    )
    return comparison


class _Session:
    """One call of ``compare``."""

    def __init__(self, settings: ComparisonSettings, tell: Progress) -> None:
        self.tell = tell
        self.task = _make_task(settings)
        record = open_folder(settings, self.task.fingerprint)
        self.settings = record.settings
        if self.settings.budget_minutes is None:
            self._decide(self.settings.planned_steps)
        self.runs = [(name, seed) for seed in settings.seeds for name in settings.trained]
        self.finished = {run: self._outcome(run) for run in self.runs if self._job(run).finished}
        self.workers = _count_workers(settings, len(self.runs) - len(self.finished))
        tell(
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

    def work(self, stop: Callable[[], bool], began: float) -> bool:
        """Do what is left to do; False if it was cut short."""
        left = [run for run in self.runs if run not in self.finished]
        if not left:
            return True
        with Crew(self.settings, self.workers) as crew:
            if self.settings.steps is None and not self._pace(crew, left, stop, began):
                return False
            return crew.run(
                [self._job(run) for run in left], done=self._done, **self._callbacks(stop)
            )

    def collect(self, command: str | None) -> Comparison:
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
                command=command or f"posenc.experiments.compare({settings!r})",
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                versions={
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "posenc": version("posenc"),
                    "platform": platform_name(),
                },
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
        self, crew: Crew, left: list[tuple[str, int]], stop: Callable[[], bool], began: float
    ) -> bool:
        """Turn the budget into steps; False if it was cut short."""
        budget = self.settings.budget_minutes
        assert budget is not None  # steps are undecided for no other reason
        names = list(dict.fromkeys(name for name, _ in left))
        paced: dict[str, tuple[float, float]] = {}

        def done(message: Done) -> None:
            assert message.paced is not None  # every order was a Pace
            paced[message.order.encoding] = message.paced

        orders = [Pace(encoding=name, measured=name == names[0]) for name in names]
        whole = crew.run(orders, done=done, **self._callbacks(stop))
        if not whole:
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
                remedy="Raise it, or compare fewer encodings, seeds or lengths.",
            )
        self._decide(steps)
        expected = spent + RESERVE * (measuring + steps * a_step) / self.workers
        self.tell(Paced(steps=steps, seconds=expected))
        return True

    def _decide(self, steps: int) -> None:
        self.settings = replace(self.settings, steps=steps, budget_minutes=None)
        Record(settings=self.settings, fingerprint=self.task.fingerprint).write()

    def _job(self, run: tuple[str, int]) -> TrainingJob:
        encoding, seed = run
        steps = self.settings.planned_steps
        return TrainingJob(encoding=encoding, seed=seed, steps=steps, out=self.settings.out)

    def _outcome(self, run: tuple[str, int]) -> Outcome:
        return Outcome.read(self._job(run).outcome)

    def _done(self, message: Done) -> None:
        order = message.order
        assert isinstance(order, TrainingJob)  # no other was given
        run = (order.encoding, order.seed)
        self.finished[run] = self._outcome(run)
        self.tell(
            RunFinished(
                encoding=order.encoding,
                seed=order.seed,
                finished=len(self.finished),
                runs=len(self.runs),
                seconds=message.took,
            )
        )

    def _callbacks(self, stop: Callable[[], bool]) -> dict[str, Any]:
        stopping = Stopping(resume=resume_command(self.settings.out))
        return {"stop": stop, "stopping": lambda: self.tell(stopping), "tell": self.tell}


def _make_task(settings: ComparisonSettings) -> Task:
    """The task, after a try whether every encoding can serve it and a step fits into memory."""
    task = settings.entry.make(settings)
    device = torch.device(settings.device)
    free = available_memory(device)
    for name in settings.trained:
        with torch.random.fork_rng(devices=[]):
            model = task.build(name)
        if free is not None:
            task.require_memory(model, free // _count_workers(settings, len(settings.trained)))
    return task


def _count_workers(settings: ComparisonSettings, runs: int) -> int:
    """The number of processes in the settings; by default enough to keep all cores busy."""
    by_cores = cores() // settings.threads if settings.device == "cpu" else 1
    return max(1, min(settings.workers or by_cores, runs))
