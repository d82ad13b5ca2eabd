"""Peak memory of a contender, forward and backward, beyond its inputs.

On the CPU it is the high-water mark of a separate process, in which large blocks are mapped
separately, so that freed memory is returned; on CUDA it is that of the allocator.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context

import torch
from benchmarks.attention.contenders import Contender

from posenc.lab.bench.passes import Case
from posenc.lab.training.machine import PeakMemory

WARM_LENGTH = 512
"""Tokens of a first call, for one-time allocations of libraries."""

SEPARATE_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc: blocks of 64 KiB and more are returned to the system when they are freed."""

Peak = tuple[int, int]
"""Bytes up to the end of the forward pass, with what backward needs, and of the backward pass."""


class MemoryMeter:
    """Measures peaks, on the CPU in a process of its own with as many threads as this one.

    Args:
        device: of the cases.
    """

    def __init__(self, device: str) -> None:
        self._apart = not device.startswith("cuda")
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> MemoryMeter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def measure(self, contender: Contender, case: Case) -> Peak | str:
        """The peak, or the reason why there is none."""
        if not self._apart:
            return measure(contender, case)
        self._pool = self._pool or _pool()
        try:
            return self._pool.submit(measure, contender, case).result()
        except BrokenProcessPool:
            self._pool = None
            return "its process was ended, for want of memory perhaps"


def _pool() -> ProcessPoolExecutor:
    """A process, replaced after each task where its high-water mark cannot be reset."""
    resettable = os.access("/proc/self/clear_refs", os.W_OK)
    pool = ProcessPoolExecutor(
        1,
        get_context("spawn"),
        torch.set_num_threads,
        (torch.get_num_threads(),),
        max_tasks_per_child=None if resettable else 1,
    )
    before = {name: os.environ.get(name) for name in SEPARATE_BLOCKS}
    os.environ.update(SEPARATE_BLOCKS)
    try:
        pool.submit(os.getpid).result()  # starts the process, which inherits the environment
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return pool


def measure(contender: Contender, case: Case) -> Peak | str:
    """The peak in this process, or the reason why the contender does not support the case."""
    call = case.build()
    reason = contender.refusal(call)
    if reason is not None:
        return reason
    short = replace(case, length=min(case.length, WARM_LENGTH))
    contender.prepare(short.build()).both()
    ready = contender.prepare(call)
    gc.collect()
    meter = PeakMemory(torch.device(case.device))
    output = ready.run()
    forward = meter.used()
    torch.autograd.grad(output, ready.wanted, ready.weight, allow_unused=True)
    return forward, meter.used()
