"""Compiled code of the Triton kernels, for devices that need not be there.

    python -m benchmarks.kernels_static                 every case; writes results/kernels_static.*
                                                        (backward passes for capability 9.0 only,
                                                        but of stick breaking and CoPE)
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
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton
from benchmarks.kernel_loops import (
    FORWARD,
    KEYS,
    KINDS,
    METHODS,
    QUERIES,
    SUMMED,
    Case,
    Loop,
    cycles,
    measured,
)
from benchmarks.machine_code import ARCHITECTURES

RESULTS = Path(__file__).parent / "results"
WIDTHS = (64, 128)

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
    ("fire", "near", FORWARD, 64): (1.5, 8),
    ("fire", "near", QUERIES, 64): (1.7, 32),
    ("fire", "near", KEYS, 64): (1.5, 32),
    ("stick_breaking", "near", FORWARD, 64): (1.7, 8),
    ("stick_breaking", "near", QUERIES, 64): (2.3, 32),
    ("stick_breaking", "near", KEYS, 64): (2.2, 32),
    ("cope", "near", FORWARD, 64): (2.4, 32),
    ("cope", "near", QUERIES, 64): (4.4, 256),
    ("cope", "near", KEYS, 64): (2.8, 64),
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
        f"{loop.spilled} ({instructions['spills']})",
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
    "| capability | width | method | tiles | launch | tile, warps | registers | "
    "spilled, B (moved in the loop) | "
    "shared, KiB | programs | tensor cores by | instructions | of which tensor / float / "
    "exp / shuffle / shared | of none | of none, a pair | of none, modelled |\n" + "|" + "---|" * 16
)


def cases(
    only: Sequence[str],
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
        if (method in only and kind in kinds) or (method, kind) == ("none", "near")
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
    order = cases(METHODS, ARCHITECTURES, WIDTHS)
    found = sorted(found, key=lambda loop: order.index(loop.case))
    rows = [asdict(loop) | {"cycles": cycles(loop)} for loop in found]
    made = {"torch": torch.__version__, "triton": triton.__version__, "loops": rows}
    (RESULTS / "kernels_static.json").write_text(json.dumps(made, indent=1) + "\n")
    (RESULTS / "kernels_static.md").write_text(page(found))


def page(found: list[Loop]) -> str:
    """The table of the loops, with its introduction."""
    table = "\n".join([HEADER, *(row(loop, found) for loop in found)])
    return f"{INTRODUCTION}\n{table}\n"


def main() -> int:
    """Compile, print, and compare with the limits."""
    parser = argparse.ArgumentParser(description="What the compiler makes of the Triton kernels.")
    parser.add_argument("--limits", action="store_true", help="what has limits")
    parser.add_argument("--only", choices=METHODS, nargs="+", help="methods beside none")
    parser.add_argument("--tiles", choices=KINDS, nargs="+")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, nargs="+")
    parser.add_argument("--width", type=int, choices=WIDTHS, nargs="+")
    options = parser.parse_args()
    architectures = options.arch or ((90,) if options.limits else ARCHITECTURES)
    kinds, only = options.tiles or tuple(KINDS), options.only or METHODS
    chosen = cases(only, architectures, options.width or WIDTHS, kinds)
    if options.limits:
        limited = {key[:2] + key[3:] for key in LIMITS} | {("none", "near", w) for w in WIDTHS}
        chosen = [case for case in chosen if (case.method, case.kind, case.width) in limited]
    trained = set(METHODS)
    if options.limits:
        trained = {key[0] for key in LIMITS if key[2] != FORWARD and key[0] in only}
        trained |= {"none"} if trained else set()
    found: list[Loop] = []
    print(HEADER)
    for case in chosen:
        everywhere = case.method in ("none", *SUMMED)
        backward = case.kind == "near" and (case.architecture == 90 or everywhere)
        backward = backward and case.method in trained
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
"modelled": by the model described there. Beside the bytes that a thread spills: how many of the
loop's instructions move such. Stick breaking and CoPE carry sums from key to key; "sums for
gradients" are those before each tile of keys, once more. Far tiles of CoPE are those from its
highest count on. FIRE's instructions are those of tiles whose distances cross no knot.
"""

if __name__ == "__main__":
    sys.exit(main())
