"""Compile launches of Triton kernels for devices that need not be there, and read their code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from posenc.attention.backends.triton import form

ARCHITECTURES = (80, 90, 100, 120)

TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "QGMMA")
GROUPS = {
    "tensor cores": TENSOR,
    "float": (
        *("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSETP", "FSET", "F2FP", "F2F"),
        *("HADD2", "HMUL2", "HFMA2", "FADD2", "FMUL2", "FFMA2"),
    ),
    "special functions": ("MUFU",),
    "shuffles": ("SHFL",),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "global memory": ("LDG", "STG", "LDGSTS", "LDGDEPBAR", "UTMALDG", "UBLKCP"),
    "spills": ("LDL", "STL"),
}
"""Instructions by kind; all others are integers, moves, masks and control."""


class AbsentDevices:
    """The driver that Triton needs, for one device of each architecture, none of which is there."""

    current = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURES[self.current], 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A compiled launch: its kernel's name, what came out, its arguments and its tile sizes."""

    kernel: str
    compiled: Any
    given: tuple[Any, ...]
    sizes: dict[str, Any]


@contextmanager
def compiling(architecture: int) -> Iterator[list[Launch]]:
    """Launches compile, at the first tile size left, and do not run; they are listed."""
    launches: list[Launch] = []
    run, choose = JITFunction.run, Autotuner.run

    def compile_only(kernel: Any, *given: Any, warmup: bool, **named: Any) -> Any:
        result = run(kernel, *given, warmup=True, **named)
        launches.append(Launch(kernel.fn.__name__, result, given, named))
        return result

    def first(tuner: Any, *given: Any, **named: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, given, strict=False))
        for config in tuner.prune_configs(named):
            before = len(launches)
            result = tuner.fn.run(*given, **named, **config.all_kwargs())
            if result.metadata.shared <= SHARED[architecture][0]:
                return result
            del launches[before:]
        raise MemoryError(f"no tile size of {tuner.base_fn.__name__} fits")

    device = AbsentDevices()
    device.current = ARCHITECTURES.index(architecture)
    before = driver._active, form.INTERPRETED
    driver._active, form.INTERPRETED = device, True
    JITFunction.run, Autotuner.run = compile_only, first
    try:
        yield launches
    finally:
        driver._active, form.INTERPRETED = before
        JITFunction.run, Autotuner.run = run, choose


SHARED = {
    80: (166_912, 167_936),
    90: (232_448, 233_472),
    100: (232_448, 233_472),
    120: (101_376, 102_400),
}
"""Bytes of shared memory of a program at most, and of a multiprocessor."""

RESIDENT = {80: 64, 90: 64, 100: 64, 120: 48}
"""Warps that a multiprocessor holds."""

REGISTERS = 65_536


@dataclass(frozen=True)
class Code:
    """Machine code of a launch.

    Args:
        registers: of a thread; spilled: bytes that it spills.
        loops: instructions of each; direct: without the branches that not all tiles take.
    """

    registers: int
    spilled: int
    loops: list[list[str]]
    direct: list[list[str]]


def code_of(launch: Launch) -> Code:
    """The machine code of a launch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(launch.compiled.asm["cubin"])
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", path)
        text = _output(triton.knobs.nvidia.nvdisasm.path, "-c", path)
    registers, spilled = (
        int(found[1]) if (found := re.search(rf"{key}:(\d+)", usage)) else 0
        for key in ("REG", "STACK")
    )
    return Code(registers, spilled, *loops(text))


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    ).stdout


def loops(code: str) -> tuple[list[list[str]], list[list[str]]]:
    """The innermost loops that multiply matrices, each as the names of its instructions.

    And the same without the branches that compute with floats: not all tiles take them. Loops are
    those of the graph of jumps: waits are repeated by jumps backwards that are none.
    """
    names, targets, jumps = [], dict[str, int](), dict[int, list[str]]()
    ends = set[int]()
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            targets[label[1]] = len(names)
        elif found := INSTRUCTION.match(line):
            condition, name, operands = found.groups()
            if name.startswith("BRA"):
                jumps[len(names)] = re.findall(r"\.L_x_\d+", operands)
            if name.split(".")[0] in ("BRA", "EXIT") and condition is None and "P" not in operands:
                ends.add(len(names))
            names.append(name)
    graph = nx.DiGraph()
    graph.add_edges_from((at, at + 1) for at in range(len(names) - 1) if at not in ends)
    graph.add_edges_from((at, targets[to]) for at, all_to in jumps.items() for to in all_to)
    above = nx.immediate_dominators(graph, 0)

    def dominates(head: int, at: int) -> bool:
        while at > head:
            at = above[at]
        return at == head

    bodies, ends_at = [], dict[tuple[int, ...], tuple[int, int]]()
    for at, all_to in jumps.items():
        for head in (targets[to] for to in all_to):
            if at in above and head <= at and dominates(head, at):
                inner = graph.subgraph(n for n in graph if n == at or n != head)
                body = sorted({head, at} | nx.ancestors(inner, at))
                bodies.append([n for n in body if n >= head])
                ends_at[tuple(bodies[-1])] = head, at
    bodies = [body for body in bodies if any(names[n].split(".")[0] in TENSOR for n in body)]
    least = sorted(a for a in bodies if not any(set(b) < set(a) for b in bodies))
    direct = []
    for body in least:
        inside = graph.subgraph(body)
        way = set(nx.shortest_path(inside, *ends_at[tuple(body)]))
        for branch in nx.weakly_connected_components(inside.subgraph(set(body) - way)):
            if not any(names[n].split(".")[0] in GROUPS["float"] for n in branch):
                way |= branch
        direct.append(sorted(way))
    whole, short = ([[names[n] for n in body] for body in each] for each in (least, direct))
    return whole, short


INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
