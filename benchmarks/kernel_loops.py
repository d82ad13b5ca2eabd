"""Kernels whose machine code ``kernels_static`` tells of, by method, kind of tile and launch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.machine_code import (
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

LENGTH = 4096
HEADS = 2

FORWARD, QUERIES, KEYS, TABLES, SUMS = (
    "forward",
    "queries' gradients",
    "keys' gradients",
    "tables' gradients",
    "sums for gradients",
)
NAMES = {
    "forward_kernel": (FORWARD,),
    "gradients_kernel": (QUERIES, KEYS),
    "offsets_kernel": (TABLES,),
    "sums_forward_kernel": (FORWARD,),
    "carries_kernel": (SUMS,),
    "sums_queries_kernel": (QUERIES,),
    "sums_keys_kernel": (KEYS,),
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
    if method in SUMMED:
        return posenc.create(method, head_dim=width) if method == "cope" else posenc.create(method)
    if method.startswith("shaw"):
        made = posenc.create("shaw", **options, max_distance=64)
        return made if method == "shaw with values" else Encoding(score=made.score)
    return posenc.create(method, **options)


SUMMED = ("stick_breaking", "cope")
"""Their kernels carry sums from key to key."""

METHODS = (
    *("none", "alibi", "t5", "shaw", "shaw with values", "transformer_xl", "deberta", "rope"),
    "fire",
    *SUMMED,
)
CLIPPED = ("shaw", "shaw with values", "deberta", "cope")
KINDS: dict[str, tuple[str, ...]] = {
    "near": METHODS,
    "far": CLIPPED,
    "packed": ("none", "alibi", "shaw"),
    "dropout": ("none", "alibi", "shaw"),
}
"""Tiles before and beyond the ends of clipped tables (of CoPE: before and from its highest count
on), within documents, and with dropout; and the methods that are told of."""


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
        # The gradients with carried sums are of some queries at a time: all launches are alike.
        again = case.method in SUMMED and seen[launch.kernel]
        if launch.kernel in NAMES and not again:
            names = NAMES[launch.kernel]
            name = names[min(seen[launch.kernel], len(names) - 1)]
            seen[launch.kernel] += 1
            found.append(loop_of(case, name, launch))
    return found


def loop_of(case: Case, name: str, launch: Launch) -> Loop:
    """The loop of a launch that the case asks for."""
    code = code_of(launch)
    sizes, metadata = launch.sizes, launch.compiled.metadata
    wanted = "far" if case.kind == "far" and name not in (TABLES, SUMS) else "near"
    # Knots are looped over in a branch that tiles within one piece do not take.
    loops = code.direct if case.method == "fire" else code.loops
    body = loops[_order(case, name, launch).index(wanted)]
    instructions = dict.fromkeys(GROUPS, 0) | {"others": 0}
    for instruction in body:
        name_of = instruction.split(".")[0]
        group = next((g for g, names in GROUPS.items() if name_of in names), "others")
        instructions[group] += 1
    block = next(
        (sizes[x], sizes[y])
        for x, y in (("block_x", "block_y"), ("block_q", "block_k"), ("block", "block"))
        if x in sizes
    )
    return Loop(
        case=case,
        launch=name,
        block=block[::-1] if name == KEYS and "block_q" in sizes else block,
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


def _order(case: Case, name: str, launch: Launch) -> list[str]:
    """Kinds of the loops of a launch, in the order of its code; those of hidden pairs are edges."""
    args = launch.given[0]
    edge = ["edge"] * bool(args.edged)
    if name == TABLES:
        return ["near"]
    if case.method not in SUMMED:
        return edge + ["far"] * bool(args.has_low) + ["near"] + ["far"] * bool(args.has_high)
    far = ["far"] * (case.method == "cope" and name != SUMS)
    if name == QUERIES:
        return edge + far + ["near"]
    return ["edge", "near", *far]


EXPONENTIALS, ISSUED = 16, 4
PRODUCTS = {80: 1024, 90: 2048, 100: 4096, 120: 256}
"""Multiply-adds a cycle of a multiprocessor, of 16-bit numbers."""


def triangles(loop: Loop) -> int:
    """Products of 16-bit numbers that sum over the keys of a tile: two to each kind of sum."""
    if loop.launch == SUMS:
        return 0
    if loop.launch == QUERIES and loop.case.method == "cope":
        return 8
    return 2 if loop.launch == FORWARD else 4


def cycles(loop: Loop) -> float:
    """Cycles of a multiprocessor for 1,000 pairs of tokens, by the model above."""
    pairs = loop.block[0] * loop.block[1]
    issued = loop.total * loop.warps / ISSUED
    exponentials = loop.instructions["special functions"] * loop.warps * 32 / EXPONENTIALS
    kind = "right and left" if loop.case.method == "deberta" else loop.case.method
    windows = {"shaw": 1, "transformer_xl": 1, "right and left": 3, "shaw with values": 3}
    squares = {SUMS: 1, FORWARD: 2, QUERIES: 3}.get(loop.launch, 4)
    if loop.case.kind != "far":
        squares += windows.get(kind, 0) * (1 if loop.launch == FORWARD else 2)
    products = squares * pairs * loop.case.width
    if loop.case.method in SUMMED and loop.case.kind != "far":
        # Products with triangles, on the side of the keys.
        keys = loop.block[0] if loop.launch == KEYS else loop.block[1]
        products += triangles(loop) * pairs * keys
    products /= PRODUCTS[loop.case.architecture]
    return max(issued, exponentials, products) / pairs * 1000
