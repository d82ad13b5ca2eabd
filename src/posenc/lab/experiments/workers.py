"""Worker processes that carry out runs in parallel."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import torch

from posenc.errors import Interrupted, PosencError, UnknownNameError
from posenc.lab.experiments.jobs import Pace, Prepare, TrainingJob, carry_out, pace, plan
from posenc.lab.experiments.progress import Event
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks import Task
from posenc.lab.training.loop import CONTROL, train

Order = TrainingJob | Pace | Prepare

UNREGISTERED = (
    "Workers import the script that calls compare, without what is under "
    '`if __name__ == "__main__":`. Call posenc.register above it, or use an entry point.'
)
"""Remedy where a name is registered in the calling process alone."""

PATIENCE = 10.0
"""Seconds that an idle process gets to end by itself."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """An order that was carried out in ``took`` seconds; ``paced`` is the result of ``pace``."""

    order: Order
    took: float
    paced: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Failed:
    """The reason why an order was not carried out."""

    error: PosencError


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    order: Order | None = None


class WorkerPool:
    """Worker processes, each with its own copy of the task; a context manager that ends them.

    Args:
        settings: of the comparison.
        count: how many processes.
    """

    def __init__(self, settings: ComparisonSettings, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Of the pool, not of the processes, which may be terminated.
        self._scratch = tempfile.TemporaryDirectory()
        self._workers: list[_Worker] = []
        # The processes inherit that Ctrl-C is not for them: they stop when they are told to.
        with _without_interrupts():
            for _ in range(count):
                ours, theirs = context.Pipe()
                arguments = (theirs, settings, count, self._scratch.name)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.connection.close()
            if worker.order is not None:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._scratch.cleanup()

    def run(
        self,
        orders: Iterable[Order | None],
        *,
        stop: Callable[[], bool],
        stopping: Callable[[], None],
        emit: Callable[[Event], None],
        done: Callable[[Done], None],
        not_applicable: Callable[[Order], bool] = lambda order: False,
    ) -> None:
        """Carry out the orders until none is left, or ``stop`` cuts them short.

        Args:
            orders: in the order they are begun; None: none at present, asked again soon.
            stop: asked several times a second; True: busy workers save and end their order.
            stopping: called once, when they have been told so.
            emit: receives the workers' events.
            done: receives each order that was carried out.
            not_applicable: True if the failure of an order does not matter any more.

        Raises:
            PosencError: what made a worker or the next order fail, after the others have saved.
        """
        waiting = iter(orders)
        left = True
        halted = False
        failure: PosencError | None = None
        while True:
            if not halted and (failure is not None or stop()):
                halted = True
                self._halt()
                if failure is None:
                    stopping()
            if not halted and left:
                try:
                    left = self._give(waiting)
                except PosencError as error:
                    failure = error
                    continue
            busy = {m.connection: m for m in self._workers if m.order is not None}
            if not busy and (halted or not left):
                break
            for connection in wait(list(busy), timeout=0.1):
                worker = busy[cast(Connection, connection)]
                message = _receive(worker)
                if isinstance(message, Done):
                    worker.order = None
                    done(message)
                elif isinstance(message, _Failed):
                    order, worker.order = worker.order, None
                    assert order is not None  # only a busy worker is listened to
                    interrupted = isinstance(message.error, Interrupted)
                    if not interrupted and not not_applicable(order):
                        failure = failure or message.error
                else:
                    emit(message)
        if failure is not None:
            raise failure

    def _give(self, orders: Iterator[Order | None]) -> bool:
        """Give each idle worker an order; False if none is left."""
        for worker in self._workers:
            if worker.order is None:
                try:
                    worker.order = next(orders)
                except StopIteration:
                    return False
                if worker.order is None:
                    return True
                # One that has just died will be noticed when it is listened to.
                with suppress(OSError):
                    worker.connection.send(worker.order)
        return True

    def _halt(self) -> None:
        for worker in self._workers:
            if worker.order is not None:
                # One that has just died will be noticed when it is listened to.
                with suppress(OSError):
                    worker.connection.send(None)


def serve(connection: Connection, settings: ComparisonSettings, workers: int, scratch: str) -> None:
    """A worker process: carries out one order after another until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces each precision
    torch.set_num_threads(settings.threads)
    task: Task | None = None
    warm = False
    while True:
        try:
            order: Order | None = connection.recv()
        except (EOFError, OSError):
            return
        if order is None:
            continue  # a request to stop that came after the end of what it was for
        answer: Done | _Failed
        try:
            began = time.perf_counter()
            task = task or settings.entry.make(settings)
            if isinstance(order, Prepare):
                connection.send(Done(order=order, took=time.perf_counter() - began))
                continue
            if not warm:
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    # Libraries allocate what they keep, which is no run's memory.
                    train(task, plan(settings, CONTROL, seed=0, steps=1, folder=Path(folder)))
                warm = True
            answer = _carry_out(order, task, settings, workers, scratch, connection)
        except UnknownNameError as error:
            answer = _Failed(
                UnknownNameError(
                    error.argument,
                    expected="a name that worker processes know, as this one does",
                    got=error.got,
                    remedy=UNREGISTERED,
                )
            )
        except PosencError as error:
            answer = _Failed(error)
        except Exception:
            got = f"an error:\n{traceback.format_exc()}"
            remedy = "Please report it. Continue with --resume when it is mended."
            answer = _failed(order, got, remedy)
        with suppress(OSError):
            connection.send(answer)


def _carry_out(
    order: TrainingJob | Pace,
    task: Task,
    settings: ComparisonSettings,
    workers: int,
    scratch: str,
    connection: Connection,
) -> Done:
    asked = False

    def stop() -> bool:
        nonlocal asked
        if not asked and connection.poll():
            asked = True
            with suppress(EOFError, OSError):  # the parent is gone: save, then end
                connection.recv()
        return asked

    def emit(event: Event) -> None:
        with suppress(OSError):  # likewise
            connection.send(event)

    began = time.perf_counter()
    paced = None
    if isinstance(order, Pace):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            paced = pace(order, task, settings, Path(folder), stop)
    else:
        carry_out(order, task, settings, workers=workers, stop=stop, emit=emit)
    return Done(order=order, took=time.perf_counter() - began, paced=paced)


def _receive(worker: _Worker) -> Event | Done | _Failed:
    try:
        message: Event | Done | _Failed = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(PATIENCE)
        code = worker.process.exitcode
        killed = code is not None and code < 0
        return _failed(
            worker.order,
            f"killed by signal {-code}" if killed else f"exit code {code}",  # type: ignore[operator]
            "If memory ran out, use fewer workers or smaller batches. Continue with --resume.",
        )
    return message


def _failed(order: Order | None, got: str, remedy: str) -> _Failed:
    error = PosencError("worker", expected=f"to carry out {order}", got=got, remedy=remedy)
    return _Failed(error)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
