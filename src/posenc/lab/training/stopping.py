"""Ends of work: Ctrl-C as a request to stop after the current step, and a budget in minutes."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from posenc.errors import ArgumentError


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A context whose value returns True after a first Ctrl-C; a second one interrupts.

    Only in the main thread, where Python lets signals be handled; elsewhere nothing changes.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class Deadline:
    """End of a budget in minutes, counted from when this is made; None: no end.

    Args:
        minutes: the budget.
    """

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def require(self, stage: str, remedy: str, *, seconds: float = 0.0) -> None:
        """Refuse a budget that ends before anything can be trained.

        Args:
            stage: what is going on, as a clause.
            remedy: for the message.
            seconds: that it still takes.

        Raises:
            ArgumentError: if less is left.
        """
        if self.left <= seconds:
            raise ArgumentError(
                "minutes",
                expected="time to prepare the data, and to train and measure a little",
                got=f"{self._minutes:g}, which ends while {stage}",
                remedy=remedy,
            )
