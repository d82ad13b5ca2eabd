"""Independent pieces of work side by side, each on one core.

What one head alone does leaves cores idle, and tiles that hold more than a line of offsets are best
kept in the cache of one core. So every worker takes heads of its own, and its operators run on its
own core alone. To wake it may take some milliseconds, until OpenMP's thread has left that core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch

__all__ = ["side_by_side"]

Item = TypeVar("Item")


def side_by_side(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call ``work(item)`` for every item, as many at a time as there are cores."""
    count = max(1, min(torch.get_num_threads(), len(items)))
    if count == 1:
        for item in items:
            work(item)
        return
    pool = _pool(os.getpid(), count)
    with _one_core_each():
        running = [pool.submit(_work, work, item) for item in items]
        for each in running:
            each.result()


def _work(work: Callable[[Item], None], item: Item) -> None:
    with torch.no_grad():  # what the operators of a new thread would otherwise record
        work(item)


_lock = threading.Lock()
_inside = 0
_threads = 0


@contextmanager
def _one_core_each() -> Iterator[None]:
    """Matrix products on one core meanwhile.

    MKL's number of threads is one for all threads of Python: without this, the products of each
    worker would spread over all cores, and take twice as long in all.
    """
    global _inside, _threads
    with _lock:
        if _inside == 0:
            _threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.set_num_threads(_threads)


@lru_cache(maxsize=4)
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process (a fork has none of its parent's), each on one core."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "posenc", initializer=lambda: torch.set_num_threads(1))
    list(pool.map(lambda _: None, range(count)))
    torch.set_num_threads(threads)  # what threads that start later begin with
    return pool
