"""Measurement of jobs, as rows of plain values."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.attention.accuracy import expect
from benchmarks.attention.contenders import Contender
from benchmarks.attention.memory import MemoryMeter
from benchmarks.attention.plan import Job

from posenc.lab.bench.passes import Pass, TimedCall, Times, timed

NO_ROOM = "the device has not enough memory"

REPEATED = 2
"""Forward calls before timed ones: the second prepares what further calls repeat."""


def measure(job: Job, meter: MemoryMeter) -> list[dict[str, Any]]:
    """A row for each contender, in order; None: not measured.

    A row has level, encoding, contender, length, causal, dtype, batch and heads of the case; what
    ``Times`` has; ``served_by``, the backend that posenc chose; ``forward_memory`` and
    ``both_memory``, peak bytes beyond the inputs; ``output_error`` and ``gradient_error``, the
    largest difference from float64 relative to the largest value; ``refusal``, the reason for
    missing values.
    """
    gc.collect()
    call = job.case.build()
    rows = {contender.name: _row(contender, call) for contender in job.contenders}
    ready: dict[str, Pass] = {}
    for contender in job.contenders:
        row = rows[contender.name]
        row["refusal"] = contender.refusal(call) or ""
        if job.rounds[0] and not row["refusal"]:
            _attempt(contender, row, lambda: _prepare(contender, call, job.warm, row, ready))  # noqa: B023
    base = job.contenders[0].name
    rounds = {
        c.name: job.rounds
        if c.name == base or c.name.startswith("posenc")
        else tuple(min(job.others, count) for count in job.rounds)
        for c in job.contenders
    }
    times = timed(ready, rounds, device=job.case.device, length=job.case.length) if ready else {}
    for name, one in times.items():
        rows[name] |= asdict(one)
    ready.clear()
    for contender in job.contenders if job.memory else ():
        if not (row := rows[contender.name])["refusal"]:
            _attempt(contender, row, lambda: _weigh(contender, job, row, meter))  # noqa: B023
    return list(rows.values())


def _row(contender: Contender, call: TimedCall) -> dict[str, Any]:
    names = ("encoding", "length", "causal", "dtype", "batch", "heads")
    case = {name: getattr(call.case, name) for name in names}
    missing = ("forward_memory", "both_memory", "output_error", "gradient_error")
    head = {"level": contender.level, "contender": contender.name, **case, "served_by": ""}
    return head | asdict(Times()) | dict.fromkeys(missing)


def _attempt(contender: Contender, row: dict[str, Any], measure: Any) -> None:
    """Failures of other libraries and a lack of memory become refusals."""
    try:
        measure()
    except torch.OutOfMemoryError:
        row["refusal"] = NO_ROOM
    except Exception as error:
        if not contender.foreign:
            raise
        row["refusal"] = f"it fails with {type(error).__name__}"


def _prepare(
    contender: Contender, call: TimedCall, warm: bool, row: dict[str, Any], ready: dict[str, Pass]
) -> None:
    one = contender.prepare(call)
    row["served_by"] = one.served_by
    if warm:
        expected = expect(contender, call) if contender.level == "call" else None
        if expected is not None:
            errors = expected.compare(one)
            row |= {"output_error": errors.output, "gradient_error": errors.gradient}
        elif one.wanted:
            one.both()
        for _ in range(REPEATED):
            one.forward()
    ready[contender.name] = one


def _weigh(contender: Contender, job: Job, row: dict[str, Any], meter: MemoryMeter) -> None:
    peak = meter.measure(contender, job.case)
    if isinstance(peak, str):
        row["refusal"] = peak
    else:
        row["forward_memory"], row["both_memory"] = peak
