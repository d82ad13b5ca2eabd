"""Peak memory of a contender, forward and backward, beyond its inputs.

On the CPU it is the high-water mark of a separate process, in which large blocks are mapped
separately, so that freed memory is returned; on CUDA it is that of the allocator.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE, Popen

import torch

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
    """Measures peaks, on the CPU in a process of its own with as many threads as this one.

    Args:
        device: of the cases.
    """

    def __init__(self, device: str) -> None:
        self._apart = not device.startswith("cuda")
        self._worker: Popen[bytes] | None = None

    def __enter__(self) -> MemoryMeter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def measure(self, contender: Contender, case: Case) -> Peak | str:
        """The peak, or the reason why there is none."""
        if not self._apart:
            return _measure(contender, case)
        if self._worker is None:
            self._worker = _start()
        try:
            answer = _ask(self._worker, (contender, case))
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
            self._worker.kill()
            with suppress(OSError):  # closing writes what was not sent
                self._worker.communicate()
            self._worker = None


def _start() -> Popen[bytes]:
    """A process that runs ``serve`` in an environment of its own; Ctrl-C does not reach it."""
    path = os.pathsep.join(sys.path)
    return Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve({torch.get_num_threads()})"],
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | SEPARATE_BLOCKS | {"PYTHONPATH": path},
        start_new_session=True,
    )


def _ask(worker: Popen[bytes], question: tuple[Contender, Case]) -> Peak | str | Exception:
    assert worker.stdin is not None
    assert worker.stdout is not None
    pickle.dump(question, worker.stdin)
    worker.stdin.flush()
    answer: Peak | str | Exception = pickle.load(worker.stdout)
    return answer


def serve(threads: int) -> None:
    """Measure what standard input brings, until it ends, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    torch.set_num_threads(threads)
    while True:
        try:
            contender, case = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Peak | str | Exception = _measure(contender, case)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")  # any can be sent
        pickle.dump(answer, answers)
        answers.flush()


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
