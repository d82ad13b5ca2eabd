"""Run of a bench, from settings to readings."""

from __future__ import annotations

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from posenc.attention.backends.native.build import description
from posenc.bench.accuracy import Errors, expect
from posenc.bench.case import Call, Case
from posenc.bench.clock import Entrant, interleaved, median_ratio
from posenc.bench.contenders import Contender, Posenc, Prepared
from posenc.bench.decoding import PosencDecoder
from posenc.bench.layers import PosencLayer
from posenc.bench.limits import NOT_MEASURED, judge
from posenc.bench.memory import MemoryMeter
from posenc.bench.plan import Job, plan
from posenc.bench.results import Reading, Report
from posenc.bench.settings import Settings
from posenc.errors import ArgumentError
from posenc.training.machine import cores, describe_device, platform_name

PACKAGES = ("posenc", "torch", "triton", "transformers", "x-transformers")

LEAST_SECONDS = 0.02
"""Shortest round; short calls are repeated."""

MOST_CALLS = 50

NO_ROOM = "the device has not enough memory"

SHORT = 1024
"""Tokens up to which calls on the CPU may be repeated."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Progress of a bench.

    Args:
        title: description of the next job.
        share: of the work that is done.
    """

    title: str
    share: float


def bench(settings: Settings, *, progress: Callable[[Step], None] = lambda step: None) -> Report:
    """Measure what the settings ask for.

    Memory on the CPU is measured in a process of its own.

    Args:
        settings: of the bench.
        progress: called before every step.

    Raises:
        ArgumentError: if this process has another number of threads than the settings ask for.
    """
    began = time.perf_counter()
    jobs = plan(settings)
    threads = settings.counts[1]
    if threads != torch.get_num_threads():
        raise ArgumentError(
            "threads",
            expected=f"{torch.get_num_threads()}, the number of threads of this process",
            got=threads,
            remedy=f"Leave it out, or call torch.set_num_threads({threads}) before.",
        )
    readings: list[Reading] = []
    total, done = sum(job.work for job in jobs), 0.0
    with MemoryMeter(settings.device) as meter:
        for job in jobs:
            progress(Step(title=describe(job), share=done / total))
            readings += measure(job, meter)
            done += job.work
    verdicts = judge(settings.limits, readings)
    return Report(
        date=datetime.now(UTC).date().isoformat(),
        seconds=time.perf_counter() - began,
        settings=settings.to_json(),
        device=describe_device(torch.device(settings.device)),
        machine={
            "system": platform_name(),
            "cores": cores(),
            "threads": threads,
            "kernels": description(),
        },
        versions={"python": platform.python_version(), **_versions()},
        readings=tuple(readings),
        verdicts=tuple(v for v in verdicts if v.reason != NOT_MEASURED),
    )


def describe(job: Job) -> str:
    """Description of a job."""
    case = job.case
    what = f"{job.contenders[0].level}s" if job.timed else "memory"
    size = f"{case.length} tokens" if case.batch == 1 else f"{case.batch} × {case.length} tokens"
    causal = ", causal" if case.causal else ""
    dtype = "" if case.dtype == "float32" else f", {case.dtype}"
    return f"{case.encoding}, {size}{causal}{dtype}: {what}"


def measure(job: Job, meter: MemoryMeter) -> list[Reading]:
    """Readings of a job, one of each contender in order."""
    gc.collect()
    call = job.case.build()
    ready: dict[str, Prepared] = {}
    readings: dict[str, Reading] = {}
    errors: dict[str, Errors] = {}
    for contender in job.contenders:
        name = contender.name
        readings[name] = Reading(
            level=contender.level,
            encoding=job.case.encoding,
            contender=name,
            length=job.case.length,
            causal=job.case.causal,
            dtype=job.case.dtype,
            batch=job.case.batch,
            heads=job.case.heads,
        )
        refusal = contender.refusal(call)
        if refusal is None and job.timed:
            try:
                prepared = contender.prepare(call)
                if job.warm:
                    _warm(contender, call, prepared, errors)
                ready[name] = prepared
            except torch.OutOfMemoryError:
                refusal = NO_ROOM
            except Exception as error:
                refusal = _failed(contender, error)
        if refusal is not None:
            readings[name] = replace(readings[name], refusal=refusal)
    left = [contender for contender in job.contenders if not readings[contender.name].refusal]
    backward = {contender.name: contender.forward_only(call) for contender in left}
    if job.timed:
        _time(job, call, ready, backward, readings)
    for name, far in errors.items():
        readings[name] = replace(
            readings[name], output_error=far.output, gradient_error=far.gradient
        )
    del ready
    for contender in left if job.memory else ():
        readings[contender.name] = _weigh(contender, job.case, readings[contender.name], meter)
    return list(readings.values())


def _failed(contender: Contender, error: Exception) -> str:
    """The failure of another library as a reason; errors of posenc are raised."""
    if not contender.foreign:
        raise error
    return f"it fails with {type(error).__name__}"


def _warm(contender: Contender, call: Call, prepared: Prepared, errors: dict[str, Errors]) -> None:
    backward = contender.forward_only(call) is None
    expected = expect(contender, call) if contender.level == "call" else None
    if expected is not None:
        errors[contender.name] = expected.compare(prepared, backward=backward)
    elif backward:
        prepared.both()
    else:
        prepared.forward()


def _time(
    job: Job,
    call: Call,
    ready: dict[str, Prepared],
    backward: dict[str, str | None],
    readings: dict[str, Reading],
) -> None:
    """Time rounds of the forward pass, then of both passes, into the readings."""
    base = job.contenders[0]
    rounds = {
        c.name: job.rounds
        if c is base or isinstance(c, Posenc | PosencLayer | PosencDecoder)
        else (min(job.others, job.rounds[0]), min(job.others, job.rounds[1]))
        for c in job.contenders
    }
    calls = {n: _calls(call.case, once, backward[n] is None) for n, once in ready.items()}
    passes = {n: Entrant(once.forward, rounds[n][0], calls[n][0]) for n, once in ready.items()}
    forward = interleaved(passes, device=call.case.device)
    passes = {
        n: Entrant(once.both, rounds[n][1], calls[n][1])
        for n, once in ready.items()
        if backward[n] is None
    }
    both = interleaved(passes, device=call.case.device)
    for name, prepared in ready.items():
        timed = replace(
            readings[name],
            served_by=prepared.served_by,
            rounds=(len(forward[name]), len(both.get(name, []))),
            forward_seconds=statistics.median(forward[name]) / prepared.tokens,
            forward_ratio=median_ratio(forward[name], forward[base.name]),
            refusal=backward[name] or "",
        )
        if name in both:
            timed = replace(
                timed,
                both_seconds=statistics.median(both[name]),
                both_ratio=median_ratio(both[name], both[base.name]),
            )
        readings[name] = timed


def _calls(case: Case, prepared: Prepared, backward: bool) -> tuple[int, int]:
    """Repetitions in a round, forward, and forward and backward."""
    cuda = case.device.startswith("cuda")
    if not cuda and case.length > SHORT:
        return 1, 1
    passes = [prepared.forward, *([prepared.both] if backward else [])]
    counts = []
    for once in passes:
        (seconds,) = interleaved({"": Entrant(once, 1)}, device=case.device)[""]
        counts.append(max(1, min(MOST_CALLS, math.ceil(LEAST_SECONDS / seconds))))
    return counts[0], counts[-1]


def _weigh(contender: Contender, case: Case, reading: Reading, meter: MemoryMeter) -> Reading:
    try:
        peak = meter.measure(contender, case)
    except torch.OutOfMemoryError:
        peak = NO_ROOM
    except Exception as error:
        peak = _failed(contender, error)
    if isinstance(peak, str):
        return replace(reading, refusal=peak)
    return replace(reading, forward_memory=peak.forward, both_memory=peak.both)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    # The metadata of the package index's builds leave out which build it is (+cu130).
    return versions | {"torch": torch.__version__}
