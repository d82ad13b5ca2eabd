"""Lowering of a problem into the record of the kernels, with reasons for what they do not support.

Segments (documents and padding) and order are read token by token.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Refusal
from posenc.attention.backends.triton.segments import segment_mask_of
from posenc.attention.problem.lowering import given_encoding, has_rows, map_term, sinks_without_rows
from posenc.attention.problem.offsets import Offsets, find_spacing
from posenc.attention.problem.problem import Problem, draw_seed
from posenc.attention.problem.record import (
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
)
from posenc.attention.problem.terms import (
    AXES,
    OF_TOKENS,
    Terms,
    max_distance_of,
    read_terms,
    reads_offsets,
)
from posenc.encoding import (
    BucketedTerms,
    DistanceFunction,
    Encoding,
    FusedScore,
    GateCounts,
    LowRank,
    Rotation,
    StickWeights,
    StructuredScore,
    repeat_heads,
)
from posenc.grid import FARTHEST, Grid
from posenc.layout.integers import exact_dtype
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
"""Scores that carry sums from key to key."""

UNCAPPED = Refusal("a cap takes sums of gates, which its kernels leave out of the logits")
NO_INTERVALS = Refusal("its kernels take no intervals of keys")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

NUMBERS, KNOTS, SLOPES, INTERCEPTS, RATES = (f"pairs.tensors.{at}" for at in range(5))
"""Paths of the tensors of a function of the distance."""

CURVE = (NUMBERS, SLOPES, INTERCEPTS)


@dataclass(frozen=True, eq=False)
class KernelForm:
    """A problem lowered for the kernels.

    Args:
        problem: what is to be computed; queries and keys may have yet to be rotated.
        lowered: its terms.
        offsets: of the pairs, as of a regular grid. None: no term depends on them, and what is
            visible is given token by token.
        ordered: what is visible follows from the offsets, but for documents and padding.
        pairs: the score in a form outside the structured one; None for none.
    """

    problem: Problem
    lowered: tuple[StructuredScore, ...]
    offsets: Offsets | None
    ordered: bool
    pairs: DistanceFunction | SumsForm | None = None

    @property
    def carries_sums(self) -> bool:
        return isinstance(self.pairs, SumsForm)

    def record(self, *, tuned: bool) -> KernelProblem:
        """The kernels' record.

        Args:
            tuned: as of ``KernelProblem``.
        """
        x, offsets, sinks = self.problem, self.offsets, None
        geometry, entries, first = Geometry(lowest=-FAR, highest=FAR), (0, 0), 0
        if offsets is not None:
            geometry = offsets.geometry()
        if self.carries_sums:  # of earlier keys, and of the query's own
            highest = -1 if isinstance(self.pairs, StickWeights) else 0
            geometry = replace(geometry, highest=min(geometry.highest, highest))
        elif x.sinks is not None:
            sinks = sinks_without_rows(x.sinks, self.lowered)
        if offsets is not None and not self.carries_sums:
            farthest = None if self.pairs is not None else max_distance_of(self.lowered)
            entries = offsets.entries(farthest)
            first = entries[0] - offsets.origin
        terms = _terms(read_terms(self.lowered, x.q, entries, bucketed=False), x.q)
        return KernelProblem(
            *(x.q, x.k, x.v, x.scale),
            terms=replace(terms, first=first),
            pairs=_pair_term(self.pairs, entries, x.q),
            geometry=geometry,
            segments=segment_mask_of(x.grid, ordered=self.ordered),
            rotary=_rotary(x.rotation),
            dropout=x.dropout,
            seed=draw_seed(x.q.device) if x.dropout else None,
            sinks=None if sinks is None else sinks.float().contiguous(),
            softcap=x.softcap or 0.0,
            tuned=tuned,
        )


def _terms(terms: Terms, q: Float[Tensor, "B H Q D"]) -> Terms:
    """The terms in the dtypes of the kernels, of all batch rows and heads."""

    def cast(name: str, x: Tensor) -> Tensor:
        in_products = AXES[name][-1] in ("F", "E")
        x = x.to(q.dtype if in_products else torch.float32)
        if name in OF_TOKENS:
            return x.expand(*q.shape[:2], *(-1 for _ in x.shape[2:]))
        return x.contiguous()

    return terms.map(cast)


def _pair_term(
    pairs: DistanceFunction | SumsForm | None, entries: tuple[int, int], q: Tensor
) -> PairTerm:
    """The kind of a score outside the structured form, and its tensors, in float32.

    Of a function of the distance: numbers by entry ``[1, N]``, knots, slopes and intercepts, and
    rates of queries. Of counts: products ``[B, H, Q, N]`` of queries with vectors by count.
    """
    if pairs is None:
        return PairTerm()
    if isinstance(pairs, DistanceFunction):
        at = torch.arange(entries[0], entries[1] + 1, device=q.device)
        numbers = pairs.distance(at.to(exact_dtype(*entries, q.device)).abs()).unsqueeze(0)
        tensors = (numbers, pairs.knots, pairs.slope, pairs.intercept, pairs.factor)
        return PairTerm("distance", tuple(x.to(torch.float32).contiguous() for x in tensors))
    if isinstance(pairs, GateCounts):
        products = pairs.product.tokens.float() @ pairs.product.rows.float().mT
        return PairTerm("counts", (products.expand(*q.shape[:2], -1, -1),))
    # A query's own key gets what is left, or nothing.
    return PairTerm("sticks_self" if pairs.rest_to_self else "sticks")


def _rotary(rotation: Rotation | None) -> RotaryFactors:
    """Factors in float32, cosines and sines as halves of one tensor, which kernels read as one."""
    if rotation is None:
        return RotaryFactors()
    query = torch.cat([factor.float() for factor in rotation.query], dim=-1)
    key = query
    if rotation.key[0] is not rotation.query[0]:
        key = torch.cat([factor.float() for factor in rotation.key], dim=-1)
    (cosine, sine), (key_cosine, key_sine) = (factor.chunk(2, dim=-1) for factor in (query, key))
    return RotaryFactors(cosine, sine, key_cosine, key_sine, rotation.pairing == "adjacent")


def single_query_record(problem: Problem) -> KernelProblem:
    """The record of one query a row: all terms become a bias and a value row a key.

    The bias ``[B, H, K]``, -inf where hidden, is the record's ``column``; the bucket of each key
    ``[B, K]`` is the tensor of the pairs.
    """
    (batch, heads), grid, encoding = problem.q.shape[:2], problem.grid, problem.encoding
    q, k = problem.q, problem.k
    if problem.lowered is not None:
        encoding = given_encoding(map_term(Tensor.float, term) for term in problem.lowered)
    elif encoding.score is not None:
        q, k = q.float(), repeat_heads(k, heads).float()
    bias = None
    if encoding.score is not None:
        bias = encoding.score(q, k, grid, scale=problem.scale).squeeze(2).float()  # [b, H, K]
    if not grid.dense:
        hidden = ~grid.visible[:, :, 0]
        blank = torch.zeros_like(hidden, dtype=torch.float32) if bias is None else bias
        bias = blank.masked_fill(hidden, -torch.inf)
    rows: Tensor | None = None
    buckets: tuple[Tensor, ...] = ()
    value = None if encoding.value is None else encoding.value.lower(grid)
    if value is not None and value.value is not None:
        bucket = value.bucket(grid.offset[:, 0])
        rows, buckets = value.value.to(problem.v.dtype), (bucket.expand(batch, -1),)
    bias = None if bias is None else bias.expand(batch, heads, -1)
    return KernelProblem(
        *(problem.q, problem.k, problem.v, problem.scale),
        terms=Terms(column=bias, value_rows=rows),
        pairs=PairTerm("single", buckets),
        geometry=Geometry(),
        segments=SegmentMask(),
        rotary=_rotary(problem.rotation),
        softcap=problem.softcap or 0.0,
    )


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
    operands = [problem.q, problem.k, problem.v, problem.sinks]
    for side in (problem.grid.query, problem.grid.key):
        operands += [side.positions, side.signal]
    learned = (p for part in problem.encoding.parts() for p in part.parameters())
    return not any(x is not None and x.requires_grad for x in (*operands, *learned))


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


def kernel_form(problem: Problem, fused: FusedScore | None = None) -> KernelForm | Refusal:
    """The problem as the kernels take it, or why they cannot.

    ``fused`` is the score part's form, if it has no structured one.

    Reads the values of a layout with documents or padding, once, where terms depend on the offset
    and nothing else tells whether tokens of a document are one position apart.
    """
    grid, lowered = problem.grid, problem.lowered
    if grid.intervals is not None:
        return NO_INTERVALS
    if isinstance(fused, SumsForm):
        return _sums_form(problem, fused)
    if isinstance(fused, DistanceFunction):
        return _form_by_offset(problem, None, fused)
    if lowered is None or any(reads_offsets(term) for term in lowered):
        return _form_by_offset(problem, lowered)
    offsets = None if grid.shift is None else Offsets.regular(grid)
    form = _fitting(KernelForm(problem, lowered, offsets, _ordered(grid)))
    if isinstance(form, Refusal):
        by_offset = _form_by_offset(problem, None)
        return form if isinstance(by_offset, Refusal) else by_offset
    return form


def _sums_form(problem: Problem, pairs: SumsForm) -> KernelForm | Refusal:
    """The form of a score with carried sums, or why the kernels cannot take it."""
    if problem.softcap is not None:
        return Refusal("its kernels that carry sums do not cap logits")
    if problem.encoding.value is not None:
        return Refusal("its kernels that carry sums have no place for a value part")
    if isinstance(pairs, GateCounts) and pairs.product.rows.shape[1] > MOST_COUNTED:
        return Refusal(f"its kernels count to {MOST_COUNTED} at most")
    spacing = find_spacing(problem.grid)
    if isinstance(spacing, str):
        return Refusal(spacing)
    if not spacing.ordered:
        return Refusal("its kernels sum over keys in the order in which they are stored")
    return KernelForm(problem, (), Offsets.shifted(problem.grid, spacing.shift), True, pairs)


def _form_by_offset(
    problem: Problem,
    lowered: tuple[StructuredScore, ...] | None,
    function: DistanceFunction | None = None,
) -> KernelForm | Refusal:
    """The form where tokens of a document are one position apart, or why there is none."""
    structured = problem
    if function is not None:
        if function.slope.shape[1] > MOST_PIECES:
            return Refusal(f"its kernels hold functions of {MOST_PIECES} pieces at most")
        structured = replace(problem, encoding=Encoding(value=problem.encoding.value))
    spacing = find_spacing(problem.grid)
    if isinstance(spacing, str):
        return Refusal(spacing)
    offsets = Offsets.shifted(problem.grid, spacing.shift, masked=spacing.ordered)
    if lowered is None:
        lowered = structured.lower_on_sequences(*offsets.reach)
    if lowered is None:
        return Refusal("the score or value part has no structured form on this grid")
    return _fitting(KernelForm(problem, lowered, offsets, spacing.ordered, function))


def _ordered(grid: Grid) -> bool:
    return grid.shift is not None or grid.band == (-FARTHEST, FARTHEST)


def _fitting(form: KernelForm) -> KernelForm | Refusal:
    """``form``, if the vectors of its terms are not too wide and the smallest tiles fit."""
    problem = form.problem
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


def features_together(x: Tensor) -> Tensor:
    """The tensor in a memory order that the kernels can read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_as(x: Float[Tensor, "B H L D"], width: int) -> Float[Tensor, "B H L E"]:
    """Uninitialised vectors of the tokens of ``x``, in its order of heads and tokens in memory.

    ``[B, L, H, D]``, transposed, is how projections leave them and take them.
    """
    batch, heads, length, _ = x.shape
    if x.transpose(1, 2).is_contiguous():
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)
