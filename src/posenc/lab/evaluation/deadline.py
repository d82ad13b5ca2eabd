"""A limit on the time of code that others wrote, in the thread that runs it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise an error in the code of a context when it takes longer.

    Lines of Python are watched, so that a loop ends on any system and in any thread; one operation
    in C is not cut short.

    Raises:
        TimeoutError: after ``seconds``.
    """
    end, before = time.monotonic() + seconds, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it took more than {seconds:g} s")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
