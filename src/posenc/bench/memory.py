"""Peak memory of a contender, forward and backward, beyond its inputs.

On the CPU it is the high-water mark of a separate process, in which large blocks are mapped
separately, so that freed memory is returned; on CUDA it is that of the allocator.
"""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch

from posenc.attention.backends.tiled.memory import release
from posenc.bench.case import Case
from posenc.bench.contenders import Contender
from posenc.training.machine import PeakMemory

WARM_LENGTH = 512
"""Tokens of a first call, for one-time allocations of libraries."""

SEPARATE_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc: blocks of 64 KiB and more are returned to the system when they are freed."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes beyond the inputs.

    Args:
        forward: up to the end of the forward pass, with what backward needs.
        both: up to the end of the backward pass.
    """

    forward: int
    both: int


class MemoryMeter:
    """Measures peaks, on the CPU in a process of its own.

    Args:
        device: of the cases.
        threads: CPU threads of that process.
    """

    def __init__(self, device: str, *, threads: int) -> None:
        self._apart = not device.startswith("cuda")
        self._threads = threads
        self._worker: tuple[SpawnProcess, Connection] | None = None

    def __enter__(self) -> MemoryMeter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def measure(self, contender: Contender, case: Case) -> Peak | str:
        """The peak, or the reason why there is none."""
        if not self._apart:
            return _measure(contender, case)
        if self._worker is None:
            self._worker = _start(self._threads)
        connection = self._worker[1]
        try:
            connection.send((contender, case))
            answer: Peak | str | Exception = connection.recv()
        except (EOFError, OSError):
            self._stop()
            return "its process was ended, for want of memory perhaps"
        if not os.access("/proc/self/clear_refs", os.W_OK):
            self._stop()  # the high-water mark cannot be reset
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _stop(self) -> None:
        if self._worker is not None:
            process, connection = self._worker
            connection.close()
            process.kill()
            process.join()
            self._worker = None


def _start(threads: int) -> tuple[SpawnProcess, Connection]:
    """A serving process, and the connection to it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
    before = {name: os.environ.get(name) for name in SEPARATE_BLOCKS}
    os.environ |= SEPARATE_BLOCKS
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    theirs.close()
    return process, ours


def _serve(connection: Connection, threads: int) -> None:
    """Measure what is received, until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process
    torch.set_num_threads(threads)
    while True:
        try:
            contender, case = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Peak | str | Exception = _measure(contender, case)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")  # any can be sent
        connection.send(answer)


def _measure(contender: Contender, case: Case) -> Peak | str:
    call = case.build()
    reason = contender.refusal(call)
    if reason is not None:
        return reason
    contender.prepare(case.at(min(case.length, WARM_LENGTH)).build()).both()
    prepared = contender.prepare(call)
    gc.collect()
    release()  # memory kept by earlier calls would not count
    meter = PeakMemory(torch.device(case.device))
    output = prepared.run()
    forward = meter.used()
    torch.autograd.grad(output, prepared.wanted, prepared.weight, allow_unused=True)
    return Peak(forward=forward, both=meter.used())
