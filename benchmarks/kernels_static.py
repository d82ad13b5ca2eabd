"""Compiled code of the Triton kernels, for devices that need not be there.

    python -m benchmarks.kernels_static                 every case; writes results/kernels_static.*
                                                        (backward passes for capability 9.0 only)
    python -m benchmarks.kernels_static --limits        cases that have limits; fails above one
    python -m benchmarks.kernels_static --only shaw --tiles near --arch 90 --width 64
                                                        those; others are kept

Each kernel is compiled at the first tile size that ``configs.fitting`` leaves, and its machine code
is read by the cuobjdump and nvdisasm that come with Triton: registers, bytes a thread spills,
shared memory, and the instructions of the loop over tiles.

**Model.** A tile takes the most of three times of a multiprocessor: issuing all instructions (four
schedulers, one a cycle each), its exponentials (16 a cycle) and its products of matrices, at the
peak of A100, H100, B200 and RTX 5090 (1,024, 2,048, 4,096 and 256 multiply-adds a cycle of 16-bit
numbers, from the published peaks and clocks). They are taken to overlap wholly, and memory to keep
up, so it is a bound from below; the ratio to attention without an encoding is of times a pair.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.machine_code import (
    ARCHITECTURES,
    GROUPS,
    REGISTERS,
    RESIDENT,
    SHARED,
    TENSOR,
    Launch,
    code_of,
    compiling,
)

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.triton import FUSED_KEYS

RESULTS = Path(__file__).parent / "results"
WIDTHS = (64, 128)
LENGTH = 4096
HEADS = 2

FORWARD, QUERIES, KEYS, TABLES = (
    "forward",
    "queries' gradients",
    "keys' gradients",
    "tables' gradients",
)
NAMES = {
    "forward_kernel": (FORWARD,),
    "gradients_kernel": (QUERIES, KEYS),
    "offsets_kernel": (TABLES,),
}
"""Kernels that are told of, and what their launches compute, in their order."""


def encoding_of(method: str, width: int) -> Encoding:
    """The encoding of a row of the table."""
    options: dict[str, Any] = {
        "dim": HEADS * width,
        "heads": HEADS,
        "head_dim": width,
        "causal": True,
    }
    if method == "none":
        return Encoding()
    if method.startswith("shaw"):
        made = posenc.create("shaw", **options, max_distance=64)
        return made if method == "shaw with values" else Encoding(score=made.score)
    return posenc.create(method, **options)


METHODS = ("none", "alibi", "t5", "shaw", "shaw with values", "transformer_xl", "deberta", "rope")
CLIPPED = ("shaw", "shaw with values", "deberta")
KINDS: dict[str, tuple[str, ...]] = {
    "near": METHODS,
    "far": CLIPPED,
    "packed": ("none", "alibi", "shaw"),
    "dropout": ("none", "alibi", "shaw"),
}
"""Tiles before and beyond the ends of clipped tables, within documents, and with dropout; and the
methods that are told of."""


@dataclass(frozen=True)
class Case:
    """One compilation.

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


def measured(case: Case, *, training: bool) -> list[Loop]:
    """The loops of all launches of a case, forward first."""
    # More keys than these are rotated before the kernels.
    length = FUSED_KEYS if case.method == "rope" else LENGTH
    layout = Layout.packed([length // 2] * 2) if case.kind == "packed" else Layout.sequence(length)
    q, k, v = (
        torch.zeros(1, HEADS, length, case.width, dtype=torch.bfloat16, requires_grad=training)
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
    code = code_of(launch)
    sizes, metadata = launch.sizes, launch.compiled.metadata
    low, high = (bool(sizes.get(name)) for name in ("has_low", "has_high"))
    order = ["edge"] * bool(sizes.get("edged")) + ["far"] * low + ["near"] + ["far"] * high
    wanted = "far" if case.kind == "far" and name != TABLES else "near"
    body = code.loops[order.index(wanted) if name != TABLES else 0]
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
        registers=code.registers,
        spilled=code.spilled,
        shared=metadata.shared,
        programs=min(
            REGISTERS // (32 * metadata.num_warps * -(-code.registers // 8) * 8),
            SHARED[case.architecture][1] // (metadata.shared + 1024),
            RESIDENT[case.architecture] // metadata.num_warps,
        ),
        tensor_core=next(i for i in body if i.split(".")[0] in TENSOR),
        instructions=instructions,
    )


LIMITS: dict[tuple[str, str, str, int], tuple[float, int]] = {
    ("alibi", "near", FORWARD, 64): (1.10, 8),
    ("alibi", "near", FORWARD, 128): (1.10, 8),
    ("t5", "near", FORWARD, 64): (1.10, 8),
    ("t5", "near", FORWARD, 128): (1.10, 8),
    ("shaw", "near", FORWARD, 64): (1.3, 32),
    ("shaw", "near", FORWARD, 128): (1.4, 128),
    ("transformer_xl", "near", FORWARD, 64): (1.6, 32),
    ("transformer_xl", "near", FORWARD, 128): (1.8, 128),
    ("deberta", "near", FORWARD, 64): (1.8, 32),
    ("none", "packed", FORWARD, 64): (1.05, 512),
    ("none", "packed", FORWARD, 128): (1.05, 512),
    ("none", "dropout", FORWARD, 64): (2.0, 32),
    ("none", "dropout", FORWARD, 128): (2.0, 128),
    **{
        (method, "near", launch, width): (1.15, 512)
        for method in ("alibi", "t5")
        for launch in (QUERIES, KEYS)
        for width in WIDTHS
    },
}
"""At most, for compute capability 9.0: instructions of a thread in a tile, as multiples of
attention without an encoding, and bytes spilled."""


def above_limits(found: list[Loop]) -> list[str]:
    """A line for each loop above its limit."""
    lines = []
    for loop in found:
        case = loop.case
        limit = LIMITS.get((case.method, case.kind, loop.launch, case.width))
        plain = baseline(loop, found)
        if limit is None or plain is None or case.architecture != 90:
            continue
        ratio = loop.total / plain.total
        if ratio > limit[0] or loop.spilled > limit[1]:
            lines.append(
                f"{case.method}, {case.kind}, {loop.launch}, width {case.width}: {ratio:.2f} times "
                f"the instructions and {loop.spilled} bytes spilled; at most {limit[0]} and "
                f"{limit[1]}"
            )
    return lines


def baseline(loop: Loop, found: list[Loop]) -> Loop | None:
    """The same launch without an encoding."""
    case = replace(loop.case, method="none", kind="near")
    return next((each for each in found if each.case == case and each.launch == loop.launch), None)


EXPONENTIALS, ISSUED = 16, 4
PRODUCTS = {80: 1024, 90: 2048, 100: 4096, 120: 256}
"""Multiply-adds a cycle of a multiprocessor, of 16-bit numbers."""


def cycles(loop: Loop) -> float:
    """Cycles of a multiprocessor for 1,000 pairs of tokens, by the model above."""
    pairs = loop.block[0] * loop.block[1]
    issued = loop.total * loop.warps / ISSUED
    exponentials = loop.instructions["special functions"] * loop.warps * 32 / EXPONENTIALS
    kind = "right and left" if loop.case.method == "deberta" else loop.case.method
    windows = {"shaw": 1, "transformer_xl": 1, "right and left": 3, "shaw with values": 3}
    squares = 2 if loop.launch == FORWARD else 3 if loop.launch == QUERIES else 4
    if loop.case.kind != "far":
        squares += windows.get(kind, 0) * (1 if loop.launch == FORWARD else 2)
    products = squares * pairs * loop.case.width / PRODUCTS[loop.case.architecture]
    return max(issued, exponentials, products) / pairs * 1000


def row(loop: Loop, found: list[Loop]) -> str:
    """A line of the table."""
    plain = baseline(loop, found)
    instructions = loop.instructions
    cells = [
        f"{loop.case.architecture / 10:.1f}",
        str(loop.case.width),
        loop.case.method,
        loop.case.kind,
        loop.launch,
        f"{loop.block[0]} × {loop.block[1]}, {loop.warps}",
        str(loop.registers),
        str(loop.spilled),
        f"{loop.shared / 1024:.0f}",
        str(loop.programs),
        loop.tensor_core.split(".")[0],
        str(loop.total),
        " / ".join(
            str(instructions[name])
            for name in ("tensor cores", "float", "special functions", "shuffles", "shared memory")
        ),
        "" if plain is None else f"{loop.total / plain.total:.2f}",
        "" if plain is None else f"{loop.per_pair / plain.per_pair:.2f}",
        "" if plain is None else f"{cycles(loop) / cycles(plain):.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| capability | width | method | tiles | launch | tile, warps | registers | spilled, B | "
    "shared, KiB | programs | tensor cores by | instructions | of which tensor / float / "
    "exp / shuffle / shared | of none | of none, a pair | of none, modelled |\n" + "|" + "---|" * 16
)


def cases(
    only: str | None,
    architectures: Sequence[int],
    widths: Sequence[int],
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Case]:
    """All cases, those without an encoding first."""
    return [
        Case(architecture, width, method, kind)
        for architecture in architectures
        for width in widths
        for kind, methods in KINDS.items()
        for method in methods
        if (only in (None, method) and kind in kinds) or (method, kind) == ("none", "near")
    ]


def kept() -> list[Loop]:
    """Loops of the results as they are."""
    rows = json.loads((RESULTS / "kernels_static.json").read_text())["loops"]
    found = []
    for each in rows:
        of_case, block = Case(**each.pop("case")), tuple(each.pop("block"))
        del each["cycles"]
        found.append(Loop(case=of_case, block=block, **each))
    return found


def write(found: list[Loop]) -> None:
    """Write the results, in the order of ``cases``."""
    order = cases(None, ARCHITECTURES, WIDTHS)
    found = sorted(found, key=lambda loop: order.index(loop.case))
    rows = [asdict(loop) | {"cycles": cycles(loop)} for loop in found]
    made = {"torch": torch.__version__, "triton": triton.__version__, "loops": rows}
    (RESULTS / "kernels_static.json").write_text(json.dumps(made, indent=1) + "\n")
    table = "\n".join([HEADER, *(row(loop, found) for loop in found)])
    (RESULTS / "kernels_static.md").write_text(f"{INTRODUCTION}\n{table}\n")


def main() -> int:
    """Compile, print, and compare with the limits."""
    parser = argparse.ArgumentParser(description="What the compiler makes of the Triton kernels.")
    parser.add_argument("--limits", action="store_true", help="what has limits")
    parser.add_argument("--only", choices=METHODS, help="one method beside none")
    parser.add_argument("--tiles", choices=KINDS, nargs="+")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, nargs="+")
    parser.add_argument("--width", type=int, choices=WIDTHS, nargs="+")
    options = parser.parse_args()
    architectures = options.arch or ((90,) if options.limits else ARCHITECTURES)
    kinds = options.tiles or tuple(KINDS)
    chosen = cases(options.only, architectures, options.width or WIDTHS, kinds)
    if options.limits:
        limited = {key[:2] + key[3:] for key in LIMITS} | {("none", "near", w) for w in WIDTHS}
        chosen = [case for case in chosen if (case.method, case.kind, case.width) in limited]
    trained = set(METHODS)
    if options.limits:
        trained = {key[0] for key in LIMITS if key[2] != FORWARD and options.only in (None, key[0])}
        trained |= {"none"} if trained else set()
    found: list[Loop] = []
    print(HEADER)
    for case in chosen:
        backward = case.architecture == 90 and case.kind == "near" and case.method in trained
        loops_of_case = measured(case, training=backward)
        found.extend(loops_of_case)
        for loop in loops_of_case:
            print(row(loop, found), flush=True)
    if not options.limits:
        write([loop for loop in kept() if loop.case not in chosen] + found)
    lines = above_limits(found)
    for line in lines:
        print(line, file=sys.stderr)
    return len(lines)


INTRODUCTION = """# The Triton kernels, compiled

Written by `python -m benchmarks.kernels_static`; no device ran them. Instructions are those of a
thread in one tile of the innermost loop. "Of none": as multiples of attention without an encoding
at the tile size it is compiled at; "a pair": instructions of all threads for a pair of tokens;
"modelled": by the model described there.
"""

if __name__ == "__main__":
    sys.exit(main())
