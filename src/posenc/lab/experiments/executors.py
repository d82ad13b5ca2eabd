"""Executors, which carry out the jobs of a comparison: processes, Slurm by submitit, Ray."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from posenc.errors import ArgumentError, Interrupted, PosencError, UnknownNameError
from posenc.lab.experiments.jobs import Job
from posenc.lab.experiments.progress import Event

UNREGISTERED = (
    "Workers import the script that calls compare, without what is under "
    '`if __name__ == "__main__":`. Call posenc.register above it, or use an entry point.'
)
"""Remedy where a name is registered in the calling process alone."""

RETRIES = 3
"""Times that a job whose process died is given to another one."""

LOGS = "launch"
"""Folder of the logs of submitit's jobs, in the comparison's."""

WEEK = 7 * 24 * 60
"""Minutes that submitit's local jobs get, instead of two."""

EMIT_PAUSE, CLUSTER_PAUSE = 0.1, 0.5
"""Seconds between two looks at jobs that send events, and at jobs that do not."""


class Handle(Protocol):
    """A job that was given away: a Future, or submitit's or Ray's like."""

    def done(self) -> bool:
        """True if it has ended."""

    def result(self) -> Any:
        """The answer of ``perform``; an exception means that the process has died."""


class Executor(ABC):
    """Carries out jobs, within its context.

    Args:
        retries: times that ``run`` gives a job whose process died to another process.
        one_machine: True if the jobs share the cores and memory of this machine.
    """

    retries = RETRIES
    one_machine = True

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:  # noqa: B027
        """End what still runs; nothing, by default."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Begin jobs, or let them wait for a free machine."""

    def events(self) -> Iterable[Event]:
        """Events of the jobs since the last call, after a pause."""
        time.sleep(CLUSTER_PAUSE)
        return ()

    def reason(self, handle: Handle, error: Exception) -> str:
        """The reason why the process of a job died."""
        return f"{type(error).__name__}: {error}"

    def cancel_waiting(self) -> Sequence[Handle]:
        """Jobs that have not begun, withdrawn; none, where they begin soon and notice the stop."""
        return ()

    def run(
        self,
        jobs: Iterable[Job],
        width: int,
        *,
        stop: Callable[[], bool],
        stopping: Callable[[PosencError | None], None],
        emit: Callable[[Event], None],
        done: Callable[[Job, Any], None],
        restarted: Callable[[Job, str], None] = lambda job, reason: None,
    ) -> None:
        """Carry out jobs until none is left, or ``stop`` cuts them short.

        Args:
            jobs: in the order they are begun.
            width: the number of jobs that are given away at a time.
            stop: asked several times a second; True: jobs save and end.
            stopping: makes them do so; called once, with the failure if that is why.
            emit: receives the jobs' events.
            done: receives each job that was carried out, and its result.
            restarted: receives each job whose process died, and why.

        Raises:
            PosencError: the first failure, after the other jobs have saved.
        """
        waiting, running = list(jobs), dict[Job, Handle]()
        deaths = Counter[Job]()
        failure: PosencError | None = None
        halted = False
        while running or (waiting and not halted):
            if not halted and (failure is not None or stop()):
                halted = True
                stopping(failure)
                for withdrawn in self.cancel_waiting():
                    running = {job: x for job, x in running.items() if x is not withdrawn}
            if not halted:
                free = width - len(running)
                chosen, waiting = waiting[:free], waiting[free:]
                if chosen:
                    running.update(zip(chosen, self.submit(chosen), strict=True))
            ended = [job for job, handle in running.items() if handle.done()]
            for event in self.events():
                emit(event)
            for job in ended:
                handle = running.pop(job)
                try:
                    answer = handle.result()
                except Exception as error:
                    deaths[job] += 1
                    reason = self.reason(handle, error)
                    if halted:
                        continue
                    if deaths[job] <= self.retries:
                        restarted(job, reason)
                        waiting.insert(0, job)
                        continue
                    remedy = "If memory ran out, use fewer workers or smaller batches. "
                    answer = _failed(job, reason, remedy + "Continue with --resume.")
                if not isinstance(answer, PosencError):
                    done(job, answer)
                elif not isinstance(answer, Interrupted):
                    failure = failure or answer
        if failure is not None:
            raise failure


def perform(job: Job, emit: Callable[[Event], None] = lambda event: None) -> Any:
    """The result of a job in this process, or the PosencError that stopped it."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces each precision
    torch.set_num_threads(job.settings.threads)
    try:
        return job.carry_out(emit)
    except UnknownNameError as error:
        expected = "a name that worker processes know, as this one does"
        return UnknownNameError(
            error.argument, expected=expected, got=error.got, remedy=UNREGISTERED
        )
    except PosencError as error:
        return error
    except Exception:
        got = f"an error:\n{traceback.format_exc()}"
        return _failed(job, got, "Please report it. Continue with --resume when it is mended.")


def _failed(job: Job, got: str, remedy: str) -> PosencError:
    return PosencError("worker", expected=f"to carry out {job}", got=got, remedy=remedy)


# Processes of this machine


class ProcessExecutor(Executor):
    """Worker processes of this machine, each with a copy of the task."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._busy: dict[Handle, _Worker] = {}

    def __exit__(self, *exception: object) -> None:
        """End all processes at once; jobs that should save have been stopped before."""
        for worker in (*self._idle, *self._busy.values()):
            worker.process.kill()
            worker.pool.shutdown()
        self._idle, self._busy = [], {}

    def submit(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Give each job to an idle worker, or to a new one."""
        return [self._submit(job) for job in jobs]

    def _submit(self, job: Job) -> Handle:
        while True:
            worker = self._idle.pop() if self._idle else _Worker()
            with suppress(BrokenProcessPool):  # it died while it was idle
                handle = worker.pool.submit(_perform_in_worker, job)
                self._busy[handle] = worker
                return handle

    def events(self) -> Iterable[Event]:
        """Events of the jobs since the last call, or soon."""
        readers = [worker.events for worker in (*self._idle, *self._busy.values())]
        pause = EMIT_PAUSE
        while ready := wait(readers, timeout=pause):
            yield from (cast(Connection, reader).recv() for reader in ready)
            pause = 0.0
        for handle in [handle for handle in self._busy if handle.done()]:
            if not cast(Future[Any], handle).exception():
                self._idle.append(self._busy.pop(handle))

    def reason(self, handle: Handle, error: Exception) -> str:
        """The signal or exit code of the process."""
        worker = self._busy.pop(handle)
        worker.pool.shutdown()
        code = worker.process.exitcode or 0
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class _Worker:
    """A process and its events: a pool of one, since a pool ends with any of its processes."""

    def __init__(self) -> None:
        context = get_context("spawn")
        # Written by one process without a lock, which one that is killed could leave locked.
        self.events, self._theirs = context.Pipe(duplex=False)
        self.pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(self._theirs,)
        )
        with _without_interrupts():
            self.pool.submit(os.getpid)  # starts the process
        (self.process,) = self.pool._processes.values()


_events: Connection | None = None
"""In a worker process, the way to its parent."""


def _begin(events: Connection) -> None:
    global _events
    _events = events
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # as if killed: what was saved is complete

    threading.Thread(target=end_with_parent, daemon=True).start()


def _perform_in_worker(job: Job) -> Any:
    assert _events is not None
    return perform(job, _events.send)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started here inherit that Ctrl-C is not for them: the stop file tells them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Clusters


def cluster_executor(name: str, out: Path, options: Mapping[str, Any]) -> Executor:
    """The executor ``"slurm"``, ``"local"`` (submitit on this machine) or ``"ray"``.

    Args:
        name: of the executor.
        out: folder of the comparison, on a file system that all machines share.
        options: of submitit's ``update_parameters`` or of ``ray.remote``.

    Raises:
        ArgumentError: if its library or the cluster is missing, or for unknown options.
    """
    if name == "ray":
        return RayExecutor(options)
    if name in ("slurm", "local"):
        return SubmititExecutor(name, out.resolve() / LOGS, options)
    raise ArgumentError("launch", expected="slurm, local or ray", got=name, remedy="Choose one.")


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(
            "launch",
            expected=f"{name} to be installed",
            got="no such module",
            remedy=f'Run pip install "posenc[{extra}]".',
        ) from error


@contextmanager
def _options_of(library: str, example: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, NameError) as error:
        raise ArgumentError(
            "launch_option",
            expected=f"options of {library}",
            got=error,
            remedy=f"See its documentation, for example {example}.",
        ) from error


class SubmititExecutor(Executor):
    """Jobs of Slurm, or ``"local"`` ones of this machine, by submitit.

    A job that is preempted or reaches its time limit is submitted again by submitit itself.
    """

    def __init__(self, cluster: str, logs: Path, options: Mapping[str, Any]) -> None:
        self.one_machine = cluster == "local"
        self._cluster, self._logs, self._options = cluster, logs, options
        self._jobs: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            self._open(Path(folder))  # its errors leave nothing behind

    def __enter__(self) -> Executor:
        self._executor = self._open(self._logs)
        return self

    def submit(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Submit the jobs at once, to Slurm as an array."""
        with _without_interrupts(), self._executor.batch():
            submitted = [self._executor.submit(Submission(job)) for job in jobs]
        self._jobs += submitted
        return submitted

    def cancel_waiting(self) -> Sequence[Handle]:
        """Jobs that the cluster has not begun, withdrawn."""
        waiting = [x for x in self._jobs if x.get_info(mode="force").get("State") == "PENDING"]
        for job in waiting:
            job.cancel(check=False)
        return waiting

    def _open(self, folder: Path) -> Any:
        submitit = _library("submitit", "slurm")
        try:
            with _options_of("submitit", "timeout_min=60"):
                executor = submitit.AutoExecutor(folder=folder, cluster=self._cluster)
                limit = {"timeout_min": WEEK} if self.one_machine else {}
                executor.update_parameters(**{"name": "posenc", **limit, **self._options})
        except RuntimeError as error:
            raise ArgumentError(
                "launch",
                expected="a machine from which jobs can be submitted to Slurm",
                got=error,
                remedy="Run it on a login node.",
            ) from error
        return executor


@dataclass(frozen=True)
class Submission:
    """A job, called by submitit in a process of its own."""

    job: Job

    def __call__(self) -> Any:
        """Carry it out."""
        return perform(self.job)

    def checkpoint(self) -> Any:
        """A submission of this job, after preemption or a timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class RayExecutor(Executor):
    """Tasks of Ray, on the cluster that ``ray.init`` connects to, or else on this machine.

    Ray itself retries tasks whose process or node died (``max_retries``, 3 by default).
    """

    retries = 0
    one_machine = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        ray = _library("ray", "ray")
        with _options_of("ray.remote", "num_gpus=1"):
            self._task = ray.remote(**{"max_retries": RETRIES, **options})(perform)

    def __enter__(self) -> Executor:
        ray = _library("ray", "ray")
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError as error:
                raise ArgumentError(
                    "launch",
                    expected="a cluster of Ray that answers",
                    got=error,
                    remedy="Set RAY_ADDRESS, or start one: ray start --head.",
                ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        """Disconnect, which ends the tasks."""
        if self._connected:
            _library("ray", "ray").shutdown()

    def submit(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Submit a task per job."""
        return [self._task.remote(job).future() for job in jobs]
