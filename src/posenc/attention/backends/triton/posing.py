"""Lowering of a problem into the record of Triton's kernels, and the tensors' memory order.

Segments (documents and padding) and order are read token by token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.triton.form import FAR, KernelForm
from posenc.attention.problem.lowering import sinks_without_rows
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem, draw_seed
from posenc.attention.problem.record import (
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
)
from posenc.attention.problem.spacing import find_spacing
from posenc.attention.problem.terms import AXES, Terms, max_distance_of, of_tokens, read_terms
from posenc.encoding import BucketedTerms, DistanceFunction, GateCounts, Rotation, StickWeights
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid
from posenc.layout.integers import exact_dtype
from posenc.layout.padding import documents_of

SUMMARY_BLOCK = 16
"""Tokens of a block whose visibility is summarised; divides all tiles."""


NUMBERS, KNOTS, SLOPES, INTERCEPTS, RATES = (f"pairs.tensors.{at}" for at in range(5))
"""Paths of the tensors of a function of the distance."""

CURVE = (NUMBERS, SLOPES, INTERCEPTS)


def record(problem: Problem, form: KernelForm, *, tuned: bool) -> KernelProblem:
    """The record of a problem in a form that the kernels have."""
    q, offsets, function = problem.q, form.offsets, form.function
    geometry, entries = Geometry(lowest=-FAR, highest=FAR), (0, 0)
    if offsets is not None:
        distance = None if function is not None else max_distance_of(form.lowered)
        entries, geometry = offsets.entries(distance), offsets.geometry()
    terms = _terms(read_terms(form.lowered, q, entries, bucketed=False), q)
    sinks = sinks_without_rows(problem.sinks, form.lowered)
    if offsets is not None:
        terms = replace(terms, first=entries[0] - offsets.origin)
    return KernelProblem(
        *(q, problem.k, problem.v, problem.scale),
        terms=terms,
        pairs=PairTerm() if function is None else _function(function, entries, q.device),
        geometry=geometry,
        segments=_segments(problem.grid, ordered=form.ordered),
        rotary=rotary_of(problem.rotation),
        dropout=problem.dropout,
        seed=draw_seed(q.device) if problem.dropout else None,
        sinks=None if sinks is None else sinks.float().contiguous(),
        softcap=problem.softcap or 0.0,
        tuned=tuned,
    )


def single_query_record(
    problem: Problem, bias: Float[Tensor, "B H K"] | None, value: BucketedTerms | None
) -> KernelProblem:
    """The record of one query a row.

    Args:
        bias: float32, -inf where hidden. It is the record's ``column``.
        value: its rows; the bucket of each key ``[B, K]`` is the tensor of the pairs.
    """
    rows: Tensor | None = None
    buckets: tuple[Tensor, ...] = ()
    if value is not None and value.value is not None:
        bucket = value.bucket(problem.grid.offset[:, 0])
        rows, buckets = value.value.to(problem.v.dtype), (bucket.expand(len(problem.q), -1),)
    return KernelProblem(
        *(problem.q, problem.k, problem.v, problem.scale),
        terms=Terms(column=bias, value_rows=rows),
        pairs=PairTerm("single", buckets),
        geometry=Geometry(),
        segments=SegmentMask(),
        rotary=rotary_of(problem.rotation),
        softcap=problem.softcap or 0.0,
    )


def sums_record(problem: Problem, form: GateCounts | StickWeights, *, tuned: bool) -> KernelProblem:
    """The record of a problem whose score carries sums from key to key."""
    q, grid, spacing = problem.q, problem.grid, find_spacing(problem.grid)
    assert not isinstance(spacing, str)  # callers have refused others
    offsets = Offsets.shifted(grid, spacing.shift)
    geometry = offsets.geometry()
    lowest, most = (min(max(-FAR, end - offsets.origin), FAR) for end in grid.band)
    if isinstance(form, GateCounts):
        tokens, rows = form.product.tokens, form.product.rows
        products = (tokens.float() @ rows.float().mT).expand(*q.shape[:2], -1, -1)
        pairs, highest = PairTerm("counts", (products,)), 0
    else:  # a query's own key gets what is left, or nothing
        pairs, highest = PairTerm("sticks_self" if form.rest_to_self else "sticks"), -1
    return KernelProblem(
        *(q, problem.k, problem.v, problem.scale),
        terms=Terms(),
        pairs=pairs,
        geometry=replace(geometry, lowest=lowest, highest=min(highest, most)),
        segments=_segments(grid, ordered=True),
        rotary=RotaryFactors(),
        dropout=problem.dropout,
        seed=draw_seed(q.device) if problem.dropout else None,
        tuned=tuned,
    )


def rotary_of(rotation: Rotation | None) -> RotaryFactors:
    """Factors in float32, cosines and sines as halves of one tensor, which kernels read as one."""
    if rotation is None:
        return RotaryFactors()
    query = torch.cat([factor.float() for factor in rotation.query], dim=-1)
    key = query
    if rotation.key[0] is not rotation.query[0]:
        key = torch.cat([factor.float() for factor in rotation.key], dim=-1)
    (cosine, sine), (key_cosine, key_sine) = (factor.chunk(2, dim=-1) for factor in (query, key))
    return RotaryFactors(cosine, sine, key_cosine, key_sine, rotation.pairing == "adjacent")


def _terms(terms: Terms, q: Float[Tensor, "B H Q D"]) -> Terms:
    """The terms in the dtypes of the kernels, of all batch rows and heads."""

    def cast(name: str, x: Tensor) -> Tensor:
        in_products = AXES[name][-1] in ("F", "E")
        x = x.to(q.dtype if in_products else torch.float32)
        if of_tokens(name):
            return x.expand(*q.shape[:2], *(-1 for _ in x.shape[2:]))
        return x.contiguous()

    return terms.map(cast)


def _function(
    function: DistanceFunction, entries: tuple[int, int], device: torch.device
) -> PairTerm:
    """Numbers by entry ``[1, N]``, knots, slopes and intercepts, and rates of queries."""
    first, last = entries
    at = torch.arange(first, last + 1, device=device).to(exact_dtype(first, last, device))
    numbers = function.distance(at.abs()).unsqueeze(0)
    tensors = (numbers, function.knots, function.slope, function.intercept, function.factor)
    return PairTerm("distance", tuple(x.to(torch.float32).contiguous() for x in tensors))


def _segments(grid: Grid, *, ordered: bool) -> SegmentMask:
    """Segments of a grid, without orders if ``ordered``; computed once per pair of layouts."""
    if ordered and not grid.segmented:
        return SegmentMask()

    def compute(grid: Grid) -> SegmentMask:
        query, key = segment_ids_of(grid)
        first, second = (
            None if ordered else side.order.contiguous() for side in (grid.query, grid.key)
        )
        return SegmentMask(query, key, first, second, _summary(query, first), _summary(key, second))

    segments = (
        compute(grid)
        if in_graph(grid)
        else reused_of_grid(compute, "segments", ordered, grid=grid, masked=False)
    )
    if ordered:
        return segments
    assert not isinstance(grid.window, tuple)  # refused by kernel_form
    return replace(segments, causal=grid.causal, window=grid.window or 0)


def segment_ids_of(grid: Grid) -> tuple[Tensor, Tensor]:
    """The segment of each token of each side, ``[B|1, L]``: pairs of different numbers are hidden.

    Padding has a number that no token of the other side has. As int32, which kernels compare in
    half the time, numbered once for each pair of layouts; as they are in graphs, each of whose
    replays would number them again.
    """
    if in_graph(grid):
        return _segment_ids(grid, *map(documents_of, (grid.query, grid.key)))
    return reused_of_grid(_number_segments, "segment ids", grid=grid, masked=False)


def in_graph(grid: Grid) -> bool:
    """True while a graph is traced or captured, each of whose replays writes its tensors anew."""
    if torch.compiler.is_compiling():
        return True
    return grid.query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _number_segments(grid: Grid) -> tuple[Tensor, Tensor]:
    sides = documents_of(grid.query), documents_of(grid.key)
    if grid.query.document is None and grid.key.document is None:
        return _segment_ids(grid, *(side.int() for side in sides))
    rows = max(map(len, sides))
    documents = torch.cat([side.expand(rows, -1) for side in sides], dim=1)
    ascending, places = documents.sort(dim=1)
    numbers = torch.zeros_like(ascending, dtype=torch.int32)
    numbers[:, 1:] = ascending.diff(dim=1).ne(0).cumsum(1)
    numbers = numbers.gather(1, places.argsort(dim=1))
    return _segment_ids(grid, *numbers.tensor_split([grid.query.length], dim=1))


def _segment_ids(grid: Grid, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the segment numbers of padding, by others for queries than for keys."""
    least = torch.iinfo(query.dtype).min
    numbered = []
    for number, (labels, side) in enumerate(((query, grid.query), (key, grid.key))):
        if side.valid is not None:
            labels = labels.masked_fill(~side.valid, least + number)
        numbered.append(labels.contiguous())
    return numbered[0], numbered[1]


def _summary(segment_ids: Tensor, order: Tensor | None) -> Tensor:
    """Least and greatest order and segment of the real tokens of each block: ``[b, n, 4]``.

    The two segments of a block with padding differ, so that it is not taken for one without.
    """
    large = 2**60
    least_label = torch.iinfo(segment_ids.dtype).min
    segment_ids = segment_ids.long()
    order = torch.zeros_like(segment_ids) if order is None else order
    rows = max(len(segment_ids), len(order))
    missing = -segment_ids.shape[1] % SUMMARY_BLOCK
    real = torch.nn.functional.pad(segment_ids > least_label + 1, (0, missing))
    real = real.view(len(real), -1, SUMMARY_BLOCK)
    padded = (~real).any(-1).long()
    columns = []
    for values, less in ((order, 0), (segment_ids, padded)):
        each = torch.nn.functional.pad(values, (0, missing)).view(len(values), -1, SUMMARY_BLOCK)
        least = each.masked_fill(~real, large).amin(-1) - less
        most = each.masked_fill(~real, -large).amax(-1)
        columns += [least.expand(rows, -1), most.expand(rows, -1)]
    return torch.stack(columns, dim=-1)


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
