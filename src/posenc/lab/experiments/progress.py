"""Progress events of a comparison.

``compare(settings, progress=callback)`` calls ``callback(event)`` in the calling process and
thread, with the events below in this order::

    RunsPrepared
    Paced                                  only with a budget in minutes
    RunStarted, Stepped*, Measuring*, RunFinished    for each run; up to `workers` runs interleave
    Restarted                              when a run's process has died; its RunStarted follows
    Stopping                               only after Ctrl-C or the end of the budget
    Finished

Runs on a cluster report RunFinished alone. Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunsPrepared:
    """Settings, data and output folder are valid; nothing has been run.

    Args:
        task: key of the task.
        title: the job, in a phrase.
        data: the data, in a phrase ("3.9 MB of …, 0.4 MB held out").
        runs: (encoding, seed) of every run, in the order they start.
        finished: number of runs that an earlier call has finished.
        workers: number of parallel processes.
        out: the output folder.
    """

    task: str
    title: str
    data: str
    runs: tuple[tuple[str, int], ...]
    finished: int
    workers: int
    out: Path


@dataclass(frozen=True, kw_only=True)
class Paced:
    """The budget in minutes has been turned into ``steps`` of each run, ``seconds`` in all."""

    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event of the run of ``encoding`` with ``seed``."""

    encoding: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """A run begins, or continues after ``step`` of its ``steps``."""

    step: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Stepped(RunEvent):
    """A run has trained on; sent a few times a second, and after the last step.

    Args:
        step, steps: done, and in all.
        loss: of the latest batch, in the unit of the task's training loss.
        tokens_per_second: so far in this call.
    """

    step: int
    steps: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Measuring(RunEvent):
    """A trained run is being measured.

    Args:
        subject: the encoding itself, or a variant (``rope|window=64``).
        done, total: measurements of this run, across all its subjects.
    """

    subject: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RunFinished(RunEvent):
    """A run is trained, measured and written.

    Args:
        finished, runs: numbers of finished runs, and of all.
        seconds: time of the run in this call.
    """

    finished: int
    runs: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Restarted(RunEvent):
    """The process of a run has died, and another continues the run.

    Args:
        reason: the way it died ("killed by signal 9").
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """Ctrl-C, or the end of the budget: workers finish their step and save.

    Args:
        resume: the command to continue.
        over_budget: the budget in minutes is over.
    """

    resume: str
    over_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a comparison.

    Args:
        complete: False if it was interrupted.
        finished, runs: numbers of finished runs, and of all.
        seconds: time of this call.
        resume: the command to continue, if it is not complete.
    """

    complete: bool
    finished: int
    runs: int
    seconds: float
    resume: str | None


Event = (
    RunsPrepared
    | Paced
    | RunStarted
    | Stepped
    | Measuring
    | RunFinished
    | Restarted
    | Stopping
    | Finished
)

Progress = Callable[[Event], None]
