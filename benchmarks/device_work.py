"""The work of ``benchmarks.device``, in a process of its own.

It answers each line of standard input with one on standard output: ``{"step": S}`` with the items
of a step, ``{"step": S, "item": I}`` with what came out of one, or with the reason why none did.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from benchmarks.attention.contenders import Contender, Flex, Plain, Posenc, WrittenOut, bias_of
from benchmarks.attention.memory import MemoryMeter
from benchmarks.attention.plan import Job
from benchmarks.attention.run import measure
from torch import Tensor

from posenc.attention import BACKENDS, trial
from posenc.attention.problem.lowering import lower
from posenc.grid import Grid
from posenc.lab.bench.passes import Case, Pass, TimedCall
from posenc.lab.training.machine import cores, describe_device, platform_name
from posenc.layout import Layout

DRY = "--dry-run" in sys.argv

DEVICE = "cpu" if DRY else "cuda"

PACKAGES = (*("posenc", "torch", "triton", "flash-attn"), *("transformers", "x-transformers"))

METHODS = (
    ("alibi", "shaw")
    if DRY
    else (
        *("nope", "rope", "alibi", "t5", "shaw", "deberta@buckets=256", "transformer_xl"),
        *("forgetting", "kerple", "rope+t5", "fire", "path", "swin"),
    )
)

ROUNDS = 1 if DRY else 10

LONG = 64 if DRY else 131_072


class FlashAttention(Contender):
    """The flash-attn package: without a score part, or with ALiBi's."""

    name = "flash-attn"
    foreign: ClassVar[bool] = True

    def refusal(self, call: TimedCall) -> str | None:
        if importlib.util.find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        if call.q.dtype.itemsize != 2:
            return "it computes in 16 bits"
        lowered = lower(call.encoding, call.q, call.k, call.grid, scale=call.scale)
        if lowered is None or (lowered and self._slopes(call) is None):
            return "it has no such score part"
        return None

    def _slopes(self, call: TimedCall) -> Tensor | None:
        """Slopes of the penalty of distance that the score part is; None for other parts."""
        lowered = lower(call.encoding, call.q, call.k, call.grid, scale=call.scale)
        if not lowered or call.grid.shift is None:
            return None
        bias = bias_of(lowered, call.q, call.grid)
        if bias is None:
            return None
        past = bias[:, : call.case.length].detach().float()
        slopes = -past[:, -2:-1]
        distance = torch.arange(call.case.length - 1, -1, -1, device=past.device)
        return slopes[:, 0] if torch.allclose(past, -slopes * distance, rtol=1e-4) else None

    def prepare(self, call: TimedCall) -> Pass:
        from flash_attn import flash_attn_func

        slopes, causal = self._slopes(call), call.case.causal

        def run() -> Tensor:
            q, k, v = call.inputs
            if call.encoding.query_key is not None:
                q, k = call.encoding.query_key(q, k, call.grid)
            operands = (x.transpose(1, 2) for x in (q, k, v))
            output: Tensor = flash_attn_func(
                *operands, softmax_scale=call.scale, causal=causal, alibi_slopes=slopes
            )
            return output.transpose(1, 2)

        return Pass(run, call.wanted, call.weight)


def contenders() -> dict[str, Contender]:
    """All that are measured beside plain SDPA, by name."""
    ours = [Posenc(backend=name) for name in ("auto", "triton", "flex", "blockwise")]
    others = [FlashAttention()] if DRY else [Flex(), FlashAttention(), WrittenOut()]
    return {each.name: each for each in [*ours, *others]}


def timed() -> dict[str, tuple[Case, str]]:
    """Cases and names of contenders, by the name of the item, the most telling first."""
    if DRY:
        sizes, names = [(16, 16)], list(contenders())
    else:
        sizes, names = [(8192, 64), (8192, 128), (2048, 64), (32_768, 64)], list(contenders())
    items = {}
    for rank, (length, width) in enumerate(sizes):
        for contender in names[: 1 if rank else None]:
            for method in METHODS:
                case = _case(method, length, width)
                items[f"{method}, {length} × {width}: {contender}"] = case, contender
    return items


def _case(method: str, length: int, width: int) -> Case:
    return Case(
        encoding=method,
        length=length,
        causal=method != "swin",
        heads=2 if DRY else 8,
        head_dim=width,
        device=DEVICE,
        dtype="float32" if DRY else "bfloat16",
    )


def environment(item: str) -> dict[str, Any]:
    """The machine, the device and the versions."""
    told: dict[str, Any] = {
        "device": describe_device(torch.device(DEVICE)),
        "system": platform_name(),
        "cores": cores(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }
    if not DRY:
        properties = torch.cuda.get_device_properties(0)
        told |= {
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "shared memory": getattr(properties, "shared_memory_per_block_optin", None),
            "driver": _driver(),
        }
    return told


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    fields = "driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def tried(name: str) -> dict[str, Any]:
    """The comparison that ``auto`` makes before it takes a backend."""
    backend, device = BACKENDS[name], torch.device(DEVICE)
    unavailable = backend.unavailable(device)
    if unavailable is not None:
        return {"unavailable": unavailable.reason}
    grid = Grid.of(Layout.sequence(9), causal=True) if DRY else trial.GRID
    return {"difference": trial.difference(backend, device, grid=grid)}


def static(item: str) -> dict[str, Any]:
    """The compiled code of one case."""
    from benchmarks import kernels_static as table

    case = _static_cases()[item]
    found = table.measured(case, training=case.kind == "near" and not DRY)
    return {
        "loops": [
            asdict(loop) | {"total": loop.total, "cycles": table.cycles(loop)} for loop in found
        ]
    }


def _static_cases() -> dict[str, Any]:
    from benchmarks import kernels_static as table

    major = 9 if DRY else torch.cuda.get_device_capability()[0]
    architecture = max((a for a in table.ARCHITECTURES if a <= 10 * major), default=80)
    found = table.cases(table.METHODS, (architecture,), table.WIDTHS)[: 1 if DRY else None]
    return {f"{each.method}, {each.kind}, width {each.width}": each for each in found}


def times(item: str) -> dict[str, Any]:
    """Times and peaks of one contender in one case, beside plain SDPA."""
    case, name = timed()[item]
    plain, mine = _measured(
        Job(
            case=case,
            contenders=(Plain(), contenders()[name]),
            rounds=(ROUNDS, ROUNDS),
            others=ROUNDS,
            warm=True,
            memory=not DRY,
        )
    )
    return {"plain": plain, "reading": mine}


def long(method: str) -> dict[str, Any]:
    """Peaks of a long call."""
    (mine,) = _measured(Job(case=_case(method, LONG, 64), contenders=(Posenc(),), memory=True))
    return {"reading": mine}


def _measured(job: Job) -> list[dict[str, Any]]:
    with MemoryMeter("cuda") as meter:  # in this process, on the CPU too
        return measure(job, meter)


STEPS: dict[str, tuple[Callable[[], Any], Callable[[str], dict[str, Any]]]] = {
    "environment": (lambda: ["environment"], environment),
    "trial": (lambda: ["triton", "flex"], tried),
    "static": (lambda: list(_static_cases()), static),
    "times": (lambda: list(timed()), times),
    "long": (lambda: METHODS[:1] if DRY else ("rope", "alibi", "t5", "shaw"), long),
}
"""The items of each step, and what measures one."""


def answer(question: dict[str, str]) -> dict[str, Any]:
    """The answer to a line."""
    items, work = STEPS[question["step"]]
    try:
        if "item" not in question:
            return {"items": list(items())}
        return work(question["item"])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:600]
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = {"error": reason, "where": f"{where.filename}:{where.lineno}"}
        # After some errors a process can no longer use the device.
        return told | ({"ended": True} if "CUDA" in reason and not _usable() else {})


def _usable() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def main() -> int:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    with _interpreter():
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line)), default=str) + "\n")
            answers.flush()
    return 0


def _interpreter() -> AbstractContextManager[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return nullcontext()
    from tests.support.interpreter import language_patched

    return language_patched()


if __name__ == "__main__":
    sys.exit(main())
