"""A comparison of encodings, from settings to results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from posenc.errors import ArgumentError, PosencError
from posenc.lab.experiments.executors import Executor, ProcessExecutor
from posenc.lab.experiments.jobs import OUTCOME, Job, Outcome, Pace, Prepare, TrainingJob
from posenc.lab.experiments.progress import (
    Finished,
    Paced,
    Progress,
    Restarted,
    RunFinished,
    RunsPrepared,
    Stopping,
)
from posenc.lab.experiments.results import Comparison, Provenance
from posenc.lab.experiments.settings import (
    NOT_ABOUT_RESULTS,
    RUNS,
    ComparisonSettings,
    Record,
    open_folder,
    resume_command,
    stop_file,
)
from posenc.lab.experiments.tasks import Task
from posenc.lab.training.machine import available_memory, cores, describe_device, versions
from posenc.lab.training.stopping import Deadline, interruptible
from posenc.storage import write_bytes

RESERVE = 1.25
"""Budgeted time is divided by this: measured speed varies, and the budget ends the training."""

RAISE = "Raise it, or compare fewer encodings, seeds or lengths."
RESUME = f"{RAISE} To go on in the same folder, add --resume."

LEAST_STEPS, STEPS_MULTIPLE = 20, 10

Run = tuple[str, int]
"""Encoding and seed of a run."""


def compare(
    settings: ComparisonSettings,
    *,
    command: str | None = None,
    progress: Progress | None = None,
    interim: Callable[[Comparison], None] | None = None,
    executor: Executor | None = None,
) -> Comparison:
    """Train every encoding with every seed, test each, and return what was found.

    An executor carries out the runs: worker processes (so a script that calls this needs the usual
    ``if __name__ == "__main__":``), or a cluster. A run is written to its folder in
    ``settings.out``; if its process dies, the executor gives it to another one, which continues
    it. After a Ctrl-C, or when ``settings.minutes`` are over, all runs finish their step and
    save, and what is finished is returned, with ``complete=False``; a second Ctrl-C raises
    KeyboardInterrupt at once.

    Args:
        settings: what to do.
        command: the command line, for the record.
        progress: receives the events of ``posenc.lab.experiments.progress``.
        interim: receives the results so far after each finished run but the last.
        executor: as ``cluster_executor`` makes them; None: processes of this machine.

    Raises:
        ArgumentError: when an encoding cannot serve it, a training step does not fit into memory,
            the budget is too small or not for a cluster, or other settings are to be resumed.
        DataError: when the text is unusable, or not the one to be resumed with.
        OutputError: when the output folder is in use, read-only or full.
        CheckpointError: when a file that is needed to resume is damaged.
        PosencError: when the process of a run has died again and again.
    """
    began = time.perf_counter()
    if executor is not None:
        if settings.minutes is not None:
            raise ArgumentError(
                "minutes",
                expected="none: it is not known how many runs a cluster does at a time",
                got=settings.minutes,
                remedy="Give --steps.",
            )
        text = None if settings.text is None else settings.text.resolve()
        settings = replace(settings, out=settings.out.resolve(), text=text)
    deadline = Deadline(settings.minutes)
    task = _make_task(settings, deadline)
    with open_folder(settings, task.fingerprint) as record, interruptible() as stop:
        session = _Session(record, task, deadline, progress or (lambda event: None), interim)
        session.command = command
        session.work(executor or ProcessExecutor(), stop, began)
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


class _Session:
    """One call of ``compare``."""

    def __init__(
        self,
        record: Record,
        task: Task,
        deadline: Deadline,
        emit: Progress,
        interim: Callable[[Comparison], None] | None,
    ) -> None:
        self.record, self.task, self.deadline = record, task, deadline
        self.emit, self.interim = emit, interim
        self.command: str | None = None
        self.settings = settings = record.settings
        if settings.steps is None and settings.minutes is None:
            self._decide(settings.planned_steps)
        self.runs = [(name, seed) for seed in settings.seeds for name in settings.trained]
        self.finished: dict[Run, Outcome] = {}
        for run in self.runs:
            if (path := self._job(run).folder / OUTCOME).exists():
                self.finished[run] = Outcome.read(path)

    def work(self, executor: Executor, stop: Callable[[], bool], began: float) -> None:
        """Do what is left to do, unless it is cut short."""
        settings = self.settings
        left = [run for run in self.runs if run not in self.finished]
        width = max(1, min(settings.workers or len(left), len(left)))
        if executor.one_machine:
            width = _count_workers(settings, len(left))
        self.emit(
            RunsPrepared(
                task=settings.task,
                title=self.task.title,
                data=self.task.data,
                runs=tuple(self.runs),
                finished=len(self.finished),
                workers=width,
                out=settings.out,
            )
        )
        if left:
            with executor:
                self._carry_out(executor, left, width, stop, began)
            stop_file(settings.out).unlink(missing_ok=True)
        if len(self.finished) == len(self.runs):
            for run in self.runs:
                self._job(run).drop_state()  # its process may have died before it did so
            for lock in (settings.out / RUNS).glob("*/.*.lock"):
                lock.unlink(missing_ok=True)

    def _carry_out(
        self,
        executor: Executor,
        left: list[Run],
        width: int,
        stop: Callable[[], bool],
        began: float,
    ) -> None:
        if self.settings.steps is None and not self._pace(executor, left, width, stop, began):
            return
        sharing = width if executor.one_machine else None

        def done(job: Job, result: tuple[Outcome, float]) -> None:
            assert isinstance(job, TrainingJob)  # no other was given
            self.finished[job.encoding, job.seed], seconds = result
            self.emit(
                RunFinished(
                    encoding=job.encoding,
                    seed=job.seed,
                    finished=len(self.finished),
                    runs=len(self.runs),
                    seconds=seconds,
                )
            )
            if self.interim is not None and len(self.finished) < len(self.runs):
                self.interim(self.collect())

        def restarted(job: Job, reason: str) -> None:
            assert isinstance(job, TrainingJob)  # no other was given
            self.emit(Restarted(encoding=job.encoding, seed=job.seed, reason=reason))

        executor.run(
            [replace(self._job(run), sharing=sharing) for run in left],
            width,
            stop=lambda: stop() or self.deadline.left <= 0,
            stopping=self._stopping,
            emit=self.emit,
            done=done,
            restarted=restarted,
        )

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
        self,
        executor: Executor,
        left: list[Run],
        width: int,
        stop: Callable[[], bool],
        began: float,
    ) -> bool:
        """Turn the budget into steps; False if it was cut short."""
        budget = self.settings.minutes
        assert budget is not None  # steps are undecided for no other reason
        names = list(dict.fromkeys(name for name, _ in left))
        paced: dict[str, tuple[float, float]] = {}

        def done(job: Job, seconds: tuple[float, float]) -> None:
            assert isinstance(job, Pace)  # no other was given
            paced[job.encoding] = seconds

        def stopped() -> bool:
            self.deadline.require("the speed of training is measured", RESUME)
            return stop()

        executor.run(
            [
                Pace(settings=self.settings, encoding=name, measured=name == names[0])
                for name in names
            ],
            width,
            stop=stopped,
            stopping=self._stopping,
            emit=self.emit,
            done=done,
        )
        if len(paced) < len(names):
            return False
        pieces = self.task.count(names[0])
        measuring = paced[names[0]][1] / pieces * sum(self.task.count(name) for name, _ in left)
        a_step = sum(paced[name][0] for name, _ in left)
        spent = time.perf_counter() - began
        seconds = (60 * budget - spent) / RESERVE * width - measuring
        steps = int(seconds / a_step) // STEPS_MULTIPLE * STEPS_MULTIPLE
        least = spent + RESERVE * (measuring + LEAST_STEPS * a_step) / width
        if steps < LEAST_STEPS:
            raise ArgumentError(
                "minutes",
                expected=f"at least {least / 60:.1f} on this machine",
                got=budget,
                remedy=RESUME,
            )
        self._decide(steps)
        expected = spent + RESERVE * (measuring + steps * a_step) / width
        self.emit(Paced(steps=steps, seconds=expected))
        return True

    def _decide(self, steps: int) -> None:
        self.settings = replace(self.settings, steps=steps, minutes=None)
        self.record = replace(self.record, settings=self.settings)
        self.record.write()

    def _job(self, run: Run) -> TrainingJob:
        encoding, seed = run
        return TrainingJob(settings=self.settings, encoding=encoding, seed=seed)

    def _stopping(self, failure: PosencError | None) -> None:
        """Make all jobs save and end."""
        write_bytes(stop_file(self.settings.out), b"")
        if failure is None:
            resume = resume_command(self.settings.out)
            self.emit(Stopping(resume=resume, over_budget=self.deadline.left <= 0))


def _make_task(settings: ComparisonSettings, deadline: Deadline) -> Task:
    """The task, after a try whether every encoding can serve it and a step fits into memory."""
    if settings.minutes is not None:
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

    with ProcessExecutor() as executor:
        executor.run(
            [Prepare(settings=settings)],
            1,
            stop=stop,
            stopping=lambda failure: None,
            emit=lambda event: None,
            done=lambda job, seconds: took.append(seconds),
        )
    deadline.require("the data is prepared", RAISE, seconds=took[0])


def _count_workers(settings: ComparisonSettings, runs: int) -> int:
    """The number of processes in the settings; by default enough to keep all cores busy."""
    by_cores = cores() // settings.threads if settings.device == "cpu" else 1
    return max(1, min(settings.workers or by_cores, runs))
