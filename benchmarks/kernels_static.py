"""What the compiler makes of the Triton kernels, for devices that need not be there.

    python -m benchmarks.kernels_static                 every case; writes results/kernels_static.*
    python -m benchmarks.kernels_static --limits        the cases that have limits; fails above one
    python -m benchmarks.kernels_static --only shaw --arch 90 --width 64

Each kernel is compiled at the first tile size that ``configs.fitting`` leaves, and its machine code
is read by the cuobjdump and nvdisasm that come with Triton: registers, bytes a thread spills,
shared memory, and the instructions of the loop over tiles.

**Model.** A tile takes the most of three times of a multiprocessor: issuing all instructions (four
schedulers, one a cycle each), its exponentials (16 a cycle) and its products of matrices (2,048
multiply-adds a cycle, 1,024 before compute capability 9.0, at 16 bits). They are taken to
overlap wholly, and memory to keep up, so it is a bound from below; the ratio to attention without
an encoding is of times a pair of tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.triton import form

RESULTS = Path(__file__).parent / "results"
ARCHITECTURES = (80, 90, 100, 120)
WIDTHS = (64, 128)
LENGTH = 4096
HEADS = 2

HEADS = 2

FORWARD, QUERIES, KEYS, TABLES = "forward", "queries' gradients", "keys' gradients", "tables' gradients"
NAMES = {"forward_kernel": (FORWARD,), "gradients_kernel": (QUERIES, KEYS), "offsets_kernel": (TABLES,)}
"""Kernels that are told of, and what their launches compute, in their order."""

TENSOR = ("HGMMA", "HMMA", "UTCHMMA", "UTCQMMA", "QGMMA")
GROUPS = {
    "tensor cores": TENSOR,
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSETP", "FSET", "F2FP", "F2F", "HADD2", "HMUL2", "HFMA2", "FADD2", "FMUL2", "FFMA2"),
    "special functions": ("MUFU",),
    "shuffles": ("SHFL",),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "global memory": ("LDG", "STG", "LDGSTS", "LDGDEPBAR", "UTMALDG", "UBLKCP"),
    "spills": ("LDL", "STL"),
}
"""Instructions by kind; all others are integers, moves, masks and control."""


def encoding_of(method: str, width: int) -> Encoding:
    """The encoding of a row of the table."""
    options: dict[str, Any] = {
        "dim": HEADS * width, "heads": HEADS, "head_dim": width, "causal": True
    }
    if method == "none":
        return Encoding()
    if method.startswith("shaw"):
        made = posenc.create("shaw", **options, max_distance=64)
        return made if method == "shaw with values" else Encoding(score=made.score)
    return posenc.create(method, **options)


METHODS = ("none", "alibi", "t5", "shaw", "shaw with values", "transformer_xl", "deberta", "rope")
KINDS = ("near", "far", "packed", "dropout")
"""Tiles: of clipped tables before and beyond their ends, within documents, with dropout."""


@dataclass(frozen=True)
class Case:
    """What is compiled.

    Args:
        architecture: compute capability, 90 for 9.0.
        width: of a head.
        method: one of ``METHODS``; kind: one of ``KINDS``.
    """

    architecture: int
    width: int
    method: str
    kind: str


@dataclass(frozen=True)
class Loop:
    """The loop over tiles of one launch of a case.

    Args:
        case: what was compiled; launch: what it computes.
        block: tokens of a tile on its own side and on the other; warps: of a program.
        registers: of a thread; spilled: bytes of a thread kept in memory for want of registers.
        shared: bytes of a program; programs: that fit a multiprocessor.
        tensor_core: the instruction that multiplies matrices.
        instructions: of a thread in a tile, by kind.
    """

    case: Case
    launch: str
    block: tuple[int, int]
    warps: int
    registers: int
    spilled: int
    shared: int
    programs: int
    tensor_core: str
    instructions: dict[str, int]

    @property
    def total(self) -> int:
        """Instructions of a thread in a tile."""
        return sum(self.instructions.values())

    @property
    def per_pair(self) -> float:
        """Instructions of all threads for a pair of tokens."""
        return self.total * self.warps * 32 / (self.block[0] * self.block[1])


class AbsentDevices:
    """What Triton asks of a driver, for one device of each architecture, none of which is there."""

    current = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURES[self.current], 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A compiled launch: its kernel's name, what came out, and its tile sizes."""

    kernel: str
    compiled: Any
    sizes: dict[str, Any]


@contextmanager
def compiling(architecture: int) -> Iterator[list[Launch]]:
    """Launches compile, at the first tile size left, and do not run; they are listed."""
    launches: list[Launch] = []
    run, choose = JITFunction.run, Autotuner.run

    def compile_only(kernel: Any, *given: Any, warmup: bool, **named: Any) -> Any:
        result = run(kernel, *given, warmup=True, **named)
        launches.append(Launch(kernel.fn.__name__, result, named))
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


SHARED = {80: (166_912, 167_936), 90: (232_448, 233_472), 100: (232_448, 233_472), 120: (101_376, 102_400)}
"""Bytes of shared memory of a program at most, and of a multiprocessor."""

RESIDENT = {80: 64, 90: 64, 100: 64, 120: 48}
"""Warps that a multiprocessor holds."""

REGISTERS = 65_536


def measured(case: Case, *, training: bool) -> list[Loop]:
    """The loops of all launches of a case, forward first."""
    layout = Layout.packed([LENGTH // 2] * 2) if case.kind == "packed" else Layout.sequence(LENGTH)
    q, k, v = (
        torch.zeros(1, HEADS, LENGTH, case.width, dtype=torch.bfloat16, requires_grad=training)
        for _ in range(3)
    )
    dropout = 0.1 if case.kind == "dropout" else 0.0
    encoding = encoding_of(case.method, case.width).requires_grad_(training)
    with compiling(case.architecture) as launches:
        grid = Grid.of(layout, causal=True)
        output = attend(q, k, v, grid, encoding, backend="triton", dropout=dropout)
        if training:
            output.sum().backward()
    found, seen = [], Counter[str]()
    for launch in launches:
        if launch.kernel in NAMES:
            names = NAMES[launch.kernel]
            name = names[min(seen[launch.kernel], len(names) - 1)]
            seen[launch.kernel] += 1
            found.append(loop_of(case, name, launch))
    return found


def loop_of(case: Case, name: str, launch: Launch) -> Loop:
    """The loop of a launch that the case asks for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(launch.compiled.asm["cubin"])
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", path)
        code = _output(triton.knobs.nvidia.nvdisasm.path, "-c", path)
    registers, spilled = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    sizes, metadata = launch.sizes, launch.compiled.metadata
    low, high = (bool(sizes.get(name)) for name in ("has_low", "has_high"))
    order = ["edge"] * bool(sizes.get("edged")) + ["far"] * low + ["near"] + ["far"] * high
    bodies = loops(code)
    wanted = "far" if case.kind == "far" and name != TABLES else "near"
    body = bodies[order.index(wanted) if name != TABLES else 0]
    instructions = dict.fromkeys(GROUPS, 0) | {"others": 0}
    for instruction in body:
        name_of = instruction.split(".")[0]
        group = next((g for g, names in GROUPS.items() if name_of in names), "others")
        instructions[group] += 1
    block = sizes.get("block")
    return Loop(
        case=case,
        launch=name,
        block=(block, block) if block else (sizes["block_x"], sizes["block_y"]),
        warps=metadata.num_warps,
        registers=registers,
        spilled=spilled,
        shared=metadata.shared,
        programs=min(
            REGISTERS // (32 * metadata.num_warps * -(-registers // 8) * 8),
            SHARED[case.architecture][1] // (metadata.shared + 1024),
            RESIDENT[case.architecture] // metadata.num_warps,
        ),
        tensor_core=next(i for i in body if i.split(".")[0] in TENSOR),
        instructions=instructions,
    )


def _output(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    ).stdout


def loops(code: str) -> list[list[str]]:
    """The innermost loops that multiply matrices, each as the names of its instructions."""
    names: list[str] = []
    targets: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            targets[label[1]] = len(names)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            # A jump behind SYNCS repeats a wait.
            if found[1] == "BRA" and not names[-1].startswith("SYNCS"):
                jumps.extend((len(names), to) for to in re.findall(r"\.L_x_\d+", found[2]))
            names.append(found[1])
    spans = [(targets[to], at + 1) for at, to in jumps if targets[to] <= at]
    spans = [
        (a, b) for a, b in spans if any(name.split(".")[0] in TENSOR for name in names[a:b])
    ]
    inner = [
        (a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)
    ]
    return [names[a:b] for a, b in sorted(inner)]
