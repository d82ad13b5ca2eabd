"""The form in which the kernels take a problem, and the reasons why some have none."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Problem, Unsupported
from posenc.attention.backends.triton.band import Band
from posenc.attention.lowering import repeat_heads
from posenc.attention.regular import max_distance_of, reads_offsets
from posenc.attention.spacing import find_spacing, lower_on_sequences
from posenc.encoding import (
    BucketedTerms,
    DistanceFunction,
    Encoding,
    FusedScore,
    LowRank,
    StructuredScore,
)
from posenc.grid import Grid
from posenc.runtime import is_transformed

__all__ = [
    "KernelForm",
    "fused_form",
    "is_single_query",
    "kernel_form",
    "refuse_device",
    "refuse_machine",
    "refuse_single_query",
    "rotary_of",
    "shared_memory",
    "tile_memory",
]

INSTALLED = importlib.util.find_spec("triton") is not None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton interprets kernels on CPU tensors, slowly, for tests."""

WIDEST = 256

MOST_PIECES = 1024
"""Of a function of the distance, whose knots each program holds."""

SMALLEST = 16
"""Tokens of each side of the smallest tiles."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class KernelForm:
    """A problem in the form that the kernels take.

    Args:
        lowered: its terms.
        band: where pairs stand.
        ordered: what is visible follows from it, but for documents and padding.
        curve: a function of the distance, added to the logits.
    """

    lowered: tuple[StructuredScore, ...]
    band: Band
    ordered: bool
    curve: DistanceFunction | None = None


def refuse_machine(device: torch.device) -> Unsupported | None:
    """The reason why this machine cannot run the kernels on a device; None if it can."""
    if not INSTALLED:
        return Unsupported("Triton is not installed")
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return Unsupported(
                f"its kernels need compute capability 8.0, not {capability[0]}.{capability[1]}"
            )
    return None


def refuse_device(problem: Problem) -> Unsupported | None:
    """The reason why no machine can run the kernels on tensors of this kind; None if it can."""
    device, dtype = problem.q.device, problem.q.dtype
    if is_transformed():
        return Unsupported("its kernels are unknown to torch.func and forward-mode differentiation")
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return Unsupported(f"its kernels run on CUDA devices, not on {device.type}")
    if dtype not in DTYPES:
        return Unsupported(f"its kernels compute in float32 at most, not in {dtype}")
    widest = max(problem.q.shape[-1], problem.v.shape[-1])
    if widest > WIDEST:
        return Unsupported(f"its kernels hold heads of width {WIDEST} at most, not {widest}")
    return None


def is_single_query(problem: Problem) -> bool:
    """True for one query a row without gradients and dropout."""
    if problem.q.shape[2] != 1 or problem.dropout:
        return False
    if not torch.is_grad_enabled():
        return True
    given = (problem.q, problem.k, problem.v, *_marks(problem.grid))
    learned = (p for part in problem.encoding.parts() for p in part.parameters())
    return not any(x.requires_grad for x in (*given, *learned))


def refuse_single_query(problem: Problem) -> Unsupported | None:
    """The reason why the kernel for one query cannot compute it; None if it can."""
    score, value = problem.encoding.score, problem.encoding.value
    if score is not None and score.replaces_product:
        return Unsupported("the score part replaces the product of queries and keys")
    if problem.lowered is None and value is not None and value.lower(problem.grid) is None:
        return Unsupported("the value part has no structured form on this grid")
    return None


def fused_form(problem: Problem) -> FusedScore | None:
    """The score part's form outside the structured one, if it has no structured one."""
    score = problem.encoding.score
    if problem.lowered is not None or score is None:
        return None
    k = repeat_heads(problem.k, problem.heads)
    return score.fuse(problem.q, k, problem.grid, scale=problem.scale)


def kernel_form(problem: Problem, fused: FusedScore | None = None) -> KernelForm | Unsupported:
    """The problem as the kernels take it, or why they cannot.

    ``fused`` is the score part's form, see ``fused_form``.

    Reads the values of a layout with documents or padding, once, where terms depend on the offset
    and nothing else tells whether tokens of a document are one position apart.
    """
    grid, lowered = problem.grid, problem.lowered
    if isinstance(fused, DistanceFunction):
        return _form_by_offset(problem, None, fused)
    if lowered is None or any(reads_offsets(term) for term in lowered):
        return _form_by_offset(problem, lowered)
    band = _band(problem, grid.shift, None)
    form = _fitting(KernelForm(lowered, band, _ordered(grid)), problem)
    if isinstance(form, Unsupported):
        by_offset = _form_by_offset(problem, None)
        return form if isinstance(by_offset, Unsupported) else by_offset
    return form


def _form_by_offset(
    problem: Problem,
    lowered: tuple[StructuredScore, ...] | None,
    curve: DistanceFunction | None = None,
) -> KernelForm | Unsupported:
    """The form where tokens of a document are one position apart, or why there is none."""
    if curve is not None:
        if curve.slope.shape[1] > MOST_PIECES:
            return Unsupported(f"its kernels hold functions of {MOST_PIECES} pieces at most")
        problem = replace(problem, encoding=Encoding(value=problem.encoding.value))
    found = find_spacing(problem.grid)
    if isinstance(found, str):
        return Unsupported(found)
    if lowered is None:
        lowered = lower_on_sequences(problem, found.shift)
    if lowered is None:
        return Unsupported("the score or value part has no structured form on this grid")
    max_distance = None if curve is not None else max_distance_of(lowered)
    band = _band(problem, found.shift, max_distance, ordered=found.ordered)
    return _fitting(KernelForm(lowered, band, found.ordered, curve), problem)


def rotary_of(problem: Problem) -> tuple[Tensor | None, Tensor | None, bool]:
    """Rotary factors of queries and keys, as in ``Operands``, and whether pairs are adjacent."""
    rotation = problem.rotation
    if rotation is None:
        return None, None, False
    query = torch.cat([factor.float() for factor in rotation.query], dim=-1)
    key = query
    if rotation.key[0] is not rotation.query[0]:
        key = torch.cat([factor.float() for factor in rotation.key], dim=-1)
    return query, key, rotation.pairing == "adjacent"


def _band(
    problem: Problem, shift: int | None, max_distance: int | None, *, ordered: bool = True
) -> Band:
    grid = problem.grid
    if shift is None:
        return Band.anywhere()
    return Band.of(
        grid.query.length,
        grid.key.length,
        shift,
        causal=grid.causal and ordered,
        window=grid.window if ordered else None,
        max_distance=max_distance,
    )


def _ordered(grid: Grid) -> bool:
    return grid.shift is not None or (not grid.causal and grid.window is None)


def _marks(grid: Grid) -> list[Tensor]:
    """Positions and signals."""
    sides = (grid.query, grid.key)
    found = [side.signal for side in sides if side.signal is not None]
    return [*found, *(side.positions for side in sides)]


def _fitting(found: KernelForm, problem: Problem) -> KernelForm | Unsupported:
    """The same, if the vectors that its terms multiply are not too wide and tiles fit."""
    groups = [term for term in found.lowered if isinstance(term, BucketedTerms)]
    factors = [term for term in found.lowered if isinstance(term, LowRank)]
    widths = {
        "left": sum(group.left.rows.shape[-1] for group in groups if group.left is not None),
        "right": sum(group.right.rows.shape[-1] for group in groups if group.right is not None),
        "low-rank": sum(term.query.shape[-1] for term in factors),
    }
    for name, width in widths.items():
        if width > WIDEST:
            return Unsupported(
                f"its kernels hold {name} vectors of width {WIDEST} at most, not {width}"
            )
    values = sum(group.value is not None for group in groups)
    tables = bool(widths["left"]) + bool(widths["right"]) + bool(values)
    widest = max(problem.q.shape[-1], problem.v.shape[-1], widths["left"], widths["right"])
    needed = tile_memory(SMALLEST, widest, problem.q.element_size(), tables)
    available = shared_memory(problem.q.device)
    if needed > available:
        return Unsupported(
            f"its smallest tiles take {needed >> 10} KiB of shared memory, and the device has "
            f"{available >> 10}"
        )
    return found


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on a device; many where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 2**31
    properties = torch.cuda.get_device_properties(device)
    # Of AMD's devices, whose properties have no more than one program's: all of it.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def tile_memory(side: int, width: int, itemsize: int, tables: int) -> int:
    """Bytes of shared memory that square tiles take at least, with so many unrolled tables.

    Those of the gradients, by the compiler for 8.0, without loads ahead: five vectors a token,
    six with one table, eight with two. A window of products is added to them.
    """
    width = max(16, 1 << (width - 1).bit_length())
    vectors = 5 + tables * (tables + 1) // 2
    return side * width * itemsize * vectors + 8 * side * side
