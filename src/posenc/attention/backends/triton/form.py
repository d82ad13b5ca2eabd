"""Lowering of a problem to the form of the kernels, with reasons for what they do not support."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Refusal
from posenc.attention.problem.lowering import has_rows
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.spacing import find_spacing, lower_on_sequences
from posenc.attention.problem.terms import reads_offsets
from posenc.encoding import (
    BucketedTerms,
    DistanceFunction,
    Encoding,
    FusedScore,
    GateCounts,
    LowRank,
    StickWeights,
    StructuredScore,
)
from posenc.grid import FARTHEST, Grid
from posenc.runtime import is_transformed

INSTALLED = importlib.util.find_spec("triton") is not None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton interprets kernels on CPU tensors, slowly, for tests."""

WIDEST = 256

MOST_COUNTED = 4096
"""Vectors by count; the more there are, the coarser counts are."""

MOST_PIECES = 1024
"""Largest number of pieces of a function of the distance; each program holds all knots."""

SMALLEST = 16
"""Tokens of each side of the smallest tiles."""

FAR = 2**30
"""A number beyond the distance of any two tokens."""

SumsForm = GateCounts | StickWeights

UNCAPPED = Refusal("a cap takes sums of gates, which its kernels leave out of the logits")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class KernelForm:
    """A problem lowered for the kernels.

    Args:
        lowered: its terms.
        offsets: of the pairs, as of a regular grid. None: no term depends on them, and what is
            visible is given token by token.
        ordered: what is visible follows from the offsets, but for documents and padding.
        function: of the distance, added to the logits.
    """

    lowered: tuple[StructuredScore, ...]
    offsets: Offsets | None
    ordered: bool
    function: DistanceFunction | None = None


def refuse_machine(device: torch.device) -> Refusal | None:
    """The reason why this machine cannot run the kernels on a device; None if it can."""
    if not INSTALLED:
        return Refusal("Triton is not installed")
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return Refusal(
                f"its kernels need compute capability 8.0, not {capability[0]}.{capability[1]}"
            )
    return None


def refuse_device(problem: Problem) -> Refusal | None:
    """The reason why no machine can run the kernels on tensors of this kind; None if it can."""
    device, dtype = problem.q.device, problem.q.dtype
    if is_transformed():
        return Refusal("its kernels are unknown to torch.func and forward-mode differentiation")
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return Refusal(f"its kernels run on CUDA devices, not on {device.type}")
    if dtype not in DTYPES:
        return Refusal(f"its kernels compute in float32 at most, not in {dtype}")
    widest = max(problem.q.shape[-1], problem.v.shape[-1])
    if widest > WIDEST:
        return Refusal(f"its kernels hold heads of width {WIDEST} at most, not {widest}")
    return None


def is_single_query(problem: Problem) -> bool:
    """True for one query a row without gradients and dropout."""
    if problem.q.shape[2] != 1 or problem.dropout:
        return False
    if not torch.is_grad_enabled():
        return True
    operands = [problem.q, problem.k, problem.v, *_positions(problem.grid)]
    operands += [] if problem.sinks is None else [problem.sinks]
    learned = (p for part in problem.encoding.parts() for p in part.parameters())
    return not any(x.requires_grad for x in (*operands, *learned))


def refuse_single_query(problem: Problem) -> Refusal | None:
    """The reason why the kernel for one query cannot compute it; None if it can."""
    score, value = problem.encoding.score, problem.encoding.value
    if score is not None and score.replaces_product:
        return Refusal("the score part replaces the product of queries and keys")
    if problem.softcap is not None and has_rows(problem.lowered or ()):
        return UNCAPPED
    if problem.lowered is None and value is not None and value.lower(problem.grid) is None:
        return Refusal("the value part has no structured form on this grid")
    return None


NO_INTERVALS = Refusal("its kernels take no intervals of keys")


def kernel_form(problem: Problem, fused: FusedScore | None = None) -> KernelForm | Refusal:
    """The problem as the kernels take it, or why they cannot.

    ``fused`` is the score part's form, if it has no structured one.

    Reads the values of a layout with documents or padding, once, where terms depend on the offset
    and nothing else tells whether tokens of a document are one position apart.
    """
    grid, lowered = problem.grid, problem.lowered
    if grid.intervals is not None:
        return NO_INTERVALS
    if isinstance(fused, DistanceFunction):
        return _form_by_offset(problem, None, fused)
    if lowered is None or any(reads_offsets(term) for term in lowered):
        return _form_by_offset(problem, lowered)
    offsets = None if grid.shift is None else Offsets.regular(grid)
    form = _fitting(KernelForm(lowered, offsets, _ordered(grid)), problem)
    if isinstance(form, Refusal):
        by_offset = _form_by_offset(problem, None)
        return form if isinstance(by_offset, Refusal) else by_offset
    return form


def sums_form(problem: Problem, form: FusedScore | None) -> SumsForm | Refusal | None:
    """The score part with carried sums, or why the kernels cannot take it; None if it carries none.

    Reads the values of a layout with documents or padding, once.
    """
    if not isinstance(form, GateCounts | StickWeights):
        return None
    if problem.softcap is not None:
        return Refusal("its kernels that carry sums do not cap logits")
    if problem.encoding.value is not None:
        return Refusal("its kernels that carry sums have no place for a value part")
    if isinstance(form, GateCounts) and form.product.rows.shape[1] > MOST_COUNTED:
        return Refusal(f"its kernels count to {MOST_COUNTED} at most")
    if problem.grid.intervals is not None:
        return NO_INTERVALS
    spacing = find_spacing(problem.grid)
    if isinstance(spacing, str):
        return Refusal(spacing)
    if not spacing.ordered:
        return Refusal("its kernels sum over keys in the order in which they are stored")
    return form


def _form_by_offset(
    problem: Problem,
    lowered: tuple[StructuredScore, ...] | None,
    function: DistanceFunction | None = None,
) -> KernelForm | Refusal:
    """The form where tokens of a document are one position apart, or why there is none."""
    if function is not None:
        if function.slope.shape[1] > MOST_PIECES:
            return Refusal(f"its kernels hold functions of {MOST_PIECES} pieces at most")
        problem = replace(problem, encoding=Encoding(value=problem.encoding.value))
    spacing = find_spacing(problem.grid)
    if isinstance(spacing, str):
        return Refusal(spacing)
    if lowered is None:
        lowered = lower_on_sequences(problem, spacing.shift)
    if lowered is None:
        return Refusal("the score or value part has no structured form on this grid")
    offsets = Offsets.shifted(problem.grid, spacing.shift, masked=spacing.ordered)
    return _fitting(KernelForm(lowered, offsets, spacing.ordered, function), problem)


def _ordered(grid: Grid) -> bool:
    return grid.shift is not None or grid.band == (-FARTHEST, FARTHEST)


def _positions(grid: Grid) -> list[Tensor]:
    """Positions and signals of both sides."""
    sides = (grid.query, grid.key)
    signals = [side.signal for side in sides if side.signal is not None]
    return [*signals, *(side.positions for side in sides)]


def _fitting(form: KernelForm, problem: Problem) -> KernelForm | Refusal:
    """``form``, if the vectors of its terms are not too wide and the smallest tiles fit."""
    if not form.ordered and isinstance(problem.grid.window, tuple):
        return Refusal("its kernels take windows of unequal sides only where order is position")
    if problem.softcap is not None and has_rows(form.lowered):
        return UNCAPPED
    groups = [term for term in form.lowered if isinstance(term, BucketedTerms)]
    factors = [term for term in form.lowered if isinstance(term, LowRank)]
    widths = {
        "left": sum(group.left.rows.shape[-1] for group in groups if group.left is not None),
        "right": sum(group.right.rows.shape[-1] for group in groups if group.right is not None),
        "low-rank": sum(term.query.shape[-1] for term in factors),
    }
    for name, width in widths.items():
        if width > WIDEST:
            return Refusal(
                f"its kernels hold {name} vectors of width {WIDEST} at most, not {width}"
            )
    values = sum(group.value is not None for group in groups)
    tables = bool(widths["left"]) + bool(widths["right"]) + bool(values)
    widest = max(problem.q.shape[-1], problem.v.shape[-1], widths["left"], widths["right"])
    needed = tile_memory(SMALLEST, widest, problem.q.element_size(), tables)
    available = shared_memory(problem.q.device)
    if needed > available:
        return Refusal(
            f"its smallest tiles take {needed >> 10} KiB of shared memory, and the device has "
            f"{available >> 10}"
        )
    return form


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
