"""Peak memory of a contender, forward and backward, beyond what its inputs take.

On the CPU by the high-water mark of a process of its own, in which large blocks are mapped and
unmapped one by one, so that what is freed is gone; on CUDA by what the allocator gave out.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

import torch

from posenc.lab.bench.case import Case
from posenc.lab.bench.contenders import Contender
from posenc.lab.machine import PeakMemory

__all__ = ["MemoryMeter", "Peak"]

WARM_LENGTH = 64
"""Tokens of a call made first, for what libraries allocate once."""

SEPARATE_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc: blocks of 64 KiB and more are returned to the system when they are freed."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes beyond the inputs.

    Args:
        forward: by the end of the forward pass, what backward needs included.
        both: by the end of the backward pass.
    """

    forward: int
    both: int


class MemoryMeter:
    """Measures peaks, on the CPU in a process that it keeps for that.

    Args:
        device: where.
        threads: CPU threads of that process.
    """

    def __init__(self, device: str, *, threads: int) -> None:
        self._apart = not device.startswith("cuda")
        self._threads = threads
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> MemoryMeter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
            self._pool = None

    def measure(self, contender: Contender, case: Case) -> Peak | str:
        """The peak, or why there is none."""
        if not self._apart:
            return _measure(contender, case)
        if self._pool is None:
            self._pool = _start(self._threads)
        try:
            return self._pool.submit(_measure, contender, case).result()
        except BrokenProcessPool:
            self._pool = None
            return "its process was ended, for want of memory perhaps"


def _start(threads: int) -> ProcessPoolExecutor:
    """A pool of one process; where its high-water mark cannot be reset, a new one a measurement."""
    resettable = os.access(Path("/proc/self/clear_refs"), os.W_OK)
    before = {name: os.environ.get(name) for name in SEPARATE_BLOCKS}
    os.environ |= SEPARATE_BLOCKS
    try:
        pool = ProcessPoolExecutor(
            1,
            mp_context=get_context("spawn"),
            initializer=torch.set_num_threads,
            initargs=(threads,),
            max_tasks_per_child=None if resettable else 1,
        )
        pool.submit(int).result()  # it is started now, while the settings stand
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return pool


def _measure(contender: Contender, case: Case) -> Peak | str:
    call = case.build()
    reason = contender.refusal(call)
    if reason is not None:
        return reason
    contender.prepare(case.at(min(case.length, WARM_LENGTH)).build()).both()
    prepared = contender.prepare(call)
    gc.collect()
    meter = PeakMemory(torch.device(case.device))
    output = prepared.run()
    forward = meter.used()
    torch.autograd.grad(output, prepared.wanted, prepared.weight, allow_unused=True)
    return Peak(forward=forward, both=meter.used())
