"""A problem as the record that Triton's kernels take."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.triton.form import FAR, KernelForm
from posenc.attention.backends.triton.segments import segments_of
from posenc.attention.problem.dropout import draw_seed
from posenc.attention.problem.lowering import sinks_beside
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.record import Geometry, KernelProblem, PairTerm, Rotary, Segments
from posenc.attention.problem.spacing import find_spacing
from posenc.attention.problem.terms import AXES, Terms, max_distance_of, of_tokens, read_terms
from posenc.encoding import BucketedTerms, DistanceFunction, GateCounts, Rotation, StickWeights
from posenc.layout.integers import exact_dtype


def record(problem: Problem, form: KernelForm, *, tuned: bool) -> KernelProblem:
    """The record of a problem in a form that the kernels have."""
    q, offsets, function = problem.q, form.offsets, form.function
    geometry, entries = Geometry(lowest=-FAR, highest=FAR), (0, 0)
    if offsets is not None:
        distance = None if function is not None else max_distance_of(form.lowered)
        entries, geometry = offsets.entries(distance), offsets.geometry()
    terms = _terms(read_terms(form.lowered, q, entries, bucketed=False), q)
    sinks = sinks_beside(problem.sinks, form.lowered)
    if offsets is not None:
        terms = replace(terms, first=entries[0] - offsets.origin)
    return KernelProblem(
        *(q, problem.k, problem.v, problem.scale),
        terms=terms,
        pairs=PairTerm() if function is None else _function(function, entries, q.device),
        geometry=geometry,
        segments=_segments(problem, form),
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
        segments=Segments(),
        rotary=rotary_of(problem.rotation),
        softcap=problem.softcap or 0.0,
    )


def sums_record(problem: Problem, form: GateCounts | StickWeights, *, tuned: bool) -> KernelProblem:
    """The record of a problem whose score carries sums from key to key."""
    q, grid, found = problem.q, problem.grid, find_spacing(problem.grid)
    assert not isinstance(found, str)  # callers have refused others
    offsets = Offsets.shifted(grid, found.shift)
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
        segments=segments_of(grid, ordered=True) if grid.segmented else Segments(),
        rotary=Rotary(),
        dropout=problem.dropout,
        seed=draw_seed(q.device) if problem.dropout else None,
        tuned=tuned,
    )


def rotary_of(rotation: Rotation | None) -> Rotary:
    """Factors in float32, cosines and sines as halves of one tensor, which kernels read as one."""
    if rotation is None:
        return Rotary()
    query = torch.cat([factor.float() for factor in rotation.query], dim=-1)
    key = query
    if rotation.key[0] is not rotation.query[0]:
        key = torch.cat([factor.float() for factor in rotation.key], dim=-1)
    (cosine, sine), (key_cosine, key_sine) = (factor.chunk(2, dim=-1) for factor in (query, key))
    return Rotary(cosine, sine, key_cosine, key_sine, rotation.pairing == "adjacent")


def _segments(problem: Problem, form: KernelForm) -> Segments:
    grid, ordered = problem.grid, form.ordered
    if ordered and not grid.segmented:
        return Segments()
    segments = segments_of(grid, ordered=ordered)
    if ordered:
        return segments
    assert not isinstance(grid.window, tuple)  # refused by kernel_form
    return replace(segments, causal=grid.causal, window=grid.window or 0)


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
