"""Independent pieces of work side by side, each on one core.

One head alone leaves cores idle, and tiles that hold more than an offset bias are best
kept in the cache of one core. So every worker takes heads of its own, and its operators run on its
own core alone. To wake it may take some milliseconds, until OpenMP's thread has left that core.

``torch.set_num_threads`` would set MKL's number of threads for the whole process. A worker limits
itself by the functions that OpenMP and MKL have for one thread; without them there are no workers.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TypeVar

import torch

Item = TypeVar("Item")


def side_by_side(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call ``work(item)`` for every item, as many at a time as there are cores.

    In the calling thread, one after another, where a thread cannot be kept on one core.
    """
    count = min(torch.get_num_threads(), len(items))
    if count <= 1 or not _can_limit_threads():
        for item in items:
            work(item)
        return
    pool = _pool(os.getpid(), count)
    running = [pool.submit(_work, work, item) for item in items]
    for each in running:
        each.result()


def _work(work: Callable[[Item], None], item: Item) -> None:
    with torch.no_grad():  # what the operators of a new thread would otherwise record
        work(item)


@lru_cache(maxsize=4)
def _pool(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process (a fork has none of its parent's), each on one core."""
    return ThreadPoolExecutor(count, "posenc", initializer=_limit_this_thread)


def _limit_this_thread() -> None:
    """Run the operators of this thread on one core, and those of no other."""
    torch.get_num_threads()  # PyTorch sets a new thread up at its first call: let that be before
    for set_threads in _setters():
        set_threads(1)


@cache
def _setters() -> tuple[Callable[[int], object], ...]:
    """OpenMP's and MKL's functions that set the threads of the calling thread; () if unknown."""
    names = ["omp_set_num_threads"]
    if torch._C.has_mkl:
        names.append("MKL_Set_Num_Threads_Local")
    try:
        library = ctypes.CDLL(torch._C.__file__)  # finds what PyTorch itself is linked with
        found = [getattr(library, name) for name in names]
    except (OSError, AttributeError):
        return ()
    for function in found:
        function.argtypes = [ctypes.c_int]
    return tuple(found)


@cache
def _can_limit_threads() -> bool:
    """True if a thread can be limited to one core without effect on others; tried on a new one."""
    if not _setters():
        return False
    seen: list[int] = []

    def attempt() -> None:
        _limit_this_thread()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return seen == [1]
