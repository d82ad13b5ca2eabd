"""Progress events of a comparison.

``compare(settings, progress=callback)`` calls ``callback(event)`` in the calling process and
thread, with the events below in this order::

    Prepared
    Paced                                  only with a budget in minutes
    RunStarted, Stepped*, Measuring*, RunFinished    for each run; up to `workers` runs interleave
    Stopping                               only after Ctrl-C
    Finished

The lab prints nothing; whoever wants a progress bar draws it from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Event",
    "Finished",
    "Measuring",
    "Paced",
    "Prepared",
    "Progress",
    "RunFinished",
    "RunStarted",
    "Stepped",
    "Stopping",
]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The settings are valid, the data is read, the output folder stands; nothing has been run.

    Args:
        task: key of the task.
        title: what is done, in a phrase.
        data: what it is done on, in a phrase ("3.9 MB of …, 0.4 MB held out").
        runs: (encoding, seed) of every run there is, in the order they start.
        finished: how many of them an earlier call has finished; they are not run again.
        workers: processes that run at the same time.
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
    """The budget in minutes has been turned into steps, by a measurement before training.

    Args:
        steps: training steps of each run.
        seconds: what the whole is expected to take.
    """

    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A run begins, or continues.

    Args:
        encoding, seed: which run.
        step: steps already done by an earlier call (0 for a new run).
        steps: steps it will have in the end.
    """

    encoding: str
    seed: int
    step: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A run has trained on; sent a few times a second, and after the last step.

    Args:
        encoding, seed: which run.
        step, steps: done, and to do in all.
        loss: of the latest batch, in the unit of the task's training loss.
        tokens_per_second: so far in this call.
    """

    encoding: str
    seed: int
    step: int
    steps: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """A trained run is being measured.

    Args:
        encoding, seed: which run.
        subject: what is measured: the encoding itself, or a variant (``rope|window=64``).
        done, total: measurements of this run, across all its subjects.
    """

    encoding: str
    seed: int
    subject: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RunFinished:
    """A run is trained, measured and written.

    Args:
        encoding, seed: which run.
        finished, runs: how many are finished now, and how many there are.
        seconds: what it took in this call.
    """

    encoding: str
    seed: int
    finished: int
    runs: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """Ctrl-C came: every worker finishes its step and saves. A second Ctrl-C kills them.

    Args:
        resume: the command that continues, ready to be shown.
    """

    resume: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Nothing runs any more.

    Args:
        complete: False when the comparison was interrupted.
        finished, runs: how many runs are finished, and how many there are.
        seconds: what this call took.
        resume: the command that continues, if it is not complete.
    """

    complete: bool
    finished: int
    runs: int
    seconds: float
    resume: str | None


Event = Prepared | Paced | RunStarted | Stepped | Measuring | RunFinished | Stopping | Finished

Progress = Callable[[Event], None]
