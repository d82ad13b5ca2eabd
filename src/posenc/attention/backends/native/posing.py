"""Lowering of a problem into the record of the compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.backends.common.fused import are_few
from posenc.attention.backends.native.few_queries import are_few_rows
from posenc.attention.backends.native.rotation import fits_inside, rotate, serves_inside
from posenc.attention.problem.images import (
    are_axial,
    axis_rows,
    has_products,
    image_table,
    shared_buckets,
    with_rows,
)
from posenc.attention.problem.lowering import is_constant_table, sinks_without_rows
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem, draw_seed
from posenc.attention.problem.record import (
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
)
from posenc.attention.problem.terms import Terms, read_terms, stacked
from posenc.encoding import (
    BlockTransforms,
    BucketedTerms,
    FusedScore,
    GateCounts,
    HeadMixing,
    LogGateSums,
    Rotation,
    StickWeights,
    StructuredScore,
    TokenTableProduct,
    repeat_heads,
)
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid
from posenc.runtime import has_values


def record_of(
    problem: Problem,
    offsets: Offsets,
    lowered: tuple[StructuredScore, ...],
    pairs: FusedScore | None = None,
    *,
    rotated: bool = True,
) -> KernelProblem:
    """The kernels' record of a problem, with offsets relative to ``Offsets.origin``.

    Args:
        problem: queries and keys may have yet to be rotated.
        offsets: of its pairs.
        lowered: its terms in structured form.
        pairs: the score in a form outside it; None for none.
        rotated: rotate queries and keys where that is faster than doing so in the kernels.
    """
    x = rotated_where_faster(problem) if rotated and problem.rotation is not None else problem
    score = x.encoding.score

    def read(_: Grid) -> Terms:
        return read_visible_terms(lowered, x, offsets)

    alone = x.encoding.value is None and pairs is None
    if score is not None and alone and all(map(is_constant_table, lowered)):
        kind = (x.q.dtype, x.q.shape[1], x.scale)
        terms = reused_of_grid(read, "terms", *kind, grid=x.grid, layers=(score,))
    else:
        terms = read(x.grid)
    origin = offsets.origin
    if origin:
        terms = replace(terms, first=terms.first - origin)
    record = _record(x, lowered, terms, offsets.geometry())
    return record if pairs is None else _with_pairs(record, pairs, offsets, x)


def fused_form(problem: Problem) -> tuple[FusedScore | None, tuple[StructuredScore, ...] | None]:
    """The score's fused form, and the value part in structured form; None for what has none."""
    score, value, grid = problem.encoding.score, problem.encoding.value, problem.grid
    if score is None or grid.query.positions.requires_grad or grid.key.positions.requires_grad:
        return None, None
    term = None if value is None else value.lower(grid)
    return problem.fused(), () if value is None else None if term is None else (term,)


def read_visible_terms(
    lowered: Sequence[StructuredScore], problem: Problem, offsets: Offsets
) -> Terms:
    """The terms at the offsets of visible pairs; buckets extend to the offsets of all pairs."""
    (first, last), reach = offsets.domain, offsets.reach
    terms = read_terms(lowered, problem.q, (first, last), bucketed=True)
    if terms.query_factor is None:  # factors are joined to the queries' and keys' own rows
        left = None if terms.left is problem.q else terms.left
        right = None if terms.right is problem.k else terms.right
        terms = replace(terms, left=left, right=right)
    if terms.bucket is None or terms.right_rows is None:
        return terms
    # Rows for keys are read at hidden pairs too.
    bucket, ends = terms.bucket, (first - reach[0], reach[1] - last)
    before, after = bucket[:1].expand(ends[0]), bucket[-1:].expand(ends[1])
    bias = terms.bias_by_offset
    return replace(
        terms,
        bucket=torch.cat([before, bucket, after]),
        bias_by_offset=None if bias is None else torch.nn.functional.pad(bias, ends),
        first=reach[0],
    )


def image_record(problem: Problem) -> KernelProblem:
    """Terms by the offsets between the cells of two images, one image row after the other."""
    grid, lowered = problem.grid, problem.lowered or ()
    (rows, columns), (_, key_columns) = grid.query.extent, grid.key.extent  # type: ignore[misc]
    jump = columns - 1
    shift = (rows - 1) * (key_columns + jump) + columns - 1
    x = rotated_where_faster(problem)
    geometry = Geometry(shift, period=key_columns, jump=jump)
    return _record(x, lowered, _image_terms(problem), geometry)


def _image_terms(problem: Problem) -> Terms:
    """Tables by offset; products by axis where rows of each axis suffice, else by bucket."""
    grid, q, bucket = problem.grid, problem.q, None
    groups = [term for term in problem.lowered or () if isinstance(term, BucketedTerms)]
    rowed = [group for group in groups if has_products(group)]
    if are_axial(rowed, grid):
        rowed = [with_rows(group, partial(axis_rows, group, grid)) for group in rowed]
    else:
        bucket, buckets = shared_buckets(rowed, grid)
        rowed = [
            with_rows(group, partial(torch.index_select, dim=1, index=n))
            for group, n in zip(rowed, buckets, strict=True)
        ]
    left, left_rows = _joined([group.left for group in rowed if group.left], q)
    right, right_rows = _joined([group.right for group in rowed if group.right], q)
    values = [group.value for group in rowed if group.value is not None]
    return Terms(
        bias_by_offset=image_table(groups, grid, device=q.device),
        left=None if left is q else left,
        left_rows=left_rows,
        right=None if right is problem.k else right,
        right_rows=right_rows,
        value_rows=reduce(torch.add, values) if values else None,
        bucket=bucket,
    )


def _joined(
    products: Sequence[TokenTableProduct], q: Tensor
) -> tuple[Float[Tensor, "B H L F"] | None, Float[Tensor, "h N F"] | None]:
    """Several products as one; the rows of products with the same tokens are summed."""
    if len({id(product.tokens) for product in products}) == 1:
        products = [replace(products[0], rows=reduce(torch.add, [x.rows for x in products]))]
    return stacked([(product, None) for product in products], q)


def rotated_where_faster(problem: Problem) -> Problem:
    """The problem with queries and keys rotated, unless the kernels rotate them as they read."""
    rotation = problem.rotation
    if rotation is None or serves_inside(rotation, problem.q, problem.k):
        return problem
    if are_few_rows(problem) and fits_inside(rotation, problem.q, problem.k):
        return problem
    q, k = rotate(rotation, problem.q, problem.k)
    return replace(problem, q=q, k=k, rotation=None)


def _record(
    problem: Problem, lowered: Sequence[StructuredScore], terms: Terms, geometry: Geometry
) -> KernelProblem:
    return KernelProblem(
        *(problem.q, problem.k, problem.v, problem.scale),
        terms=terms,
        pairs=PairTerm(),
        geometry=geometry,
        segments=SegmentMask(),
        rotary=RotaryFactors() if problem.rotation is None else _rotary(problem.rotation),
        dropout=problem.dropout,
        seed=draw_seed(problem.q.device) if problem.dropout else None,
        sinks=None if problem.sinks is None else sinks_without_rows(problem.sinks, lowered),
        softcap=problem.softcap or 0.0,
    )


def _rotary(rotation: Rotation) -> RotaryFactors:
    cosine, sine, key_cosine, key_sine = (x.detach() for x in (*rotation.query, *rotation.key))
    return RotaryFactors(cosine, sine, key_cosine, key_sine, rotation.pairing == "adjacent")


def _with_pairs(
    record: KernelProblem, form: FusedScore, offsets: Offsets, problem: Problem
) -> KernelProblem:
    """The record with a term of pairs, whose functions of the offset are read here."""
    (first, last), origin, terms = offsets.domain, offsets.origin, record.terms
    if isinstance(form, GateCounts):
        left = None if form.product.tokens is problem.q else form.product.tokens
        terms = replace(terms, left=left, left_rows=form.product.rows)
        return replace(record, terms=terms, pairs=PairTerm("counts"))
    if isinstance(form, LogGateSums):
        query, key = (x.expand(len(problem.q), *x.shape[1:]) for x in (form.query, form.key))
        return replace(record, pairs=PairTerm("log_gates", (query, key, form.slope)))
    if isinstance(form, StickWeights):
        return replace(record, pairs=PairTerm("sticks_self" if form.rest_to_self else "sticks"))
    if isinstance(form, BlockTransforms):
        query, key, matrices, diagonal = form.compute()
        v = repeat_heads(record.v, problem.heads).to(query.dtype)
        pairs = PairTerm("blocks", (matrices, diagonal))
        return replace(record, q=query, k=key.to(query.dtype), v=v, scale=1.0, pairs=pairs)
    if isinstance(form, HeadMixing):
        positions = (problem.grid.query.positions.dtype, problem.grid.key.positions.dtype)
        bias = form.bias(torch.arange(first, last + 1).to(torch.promote_types(*positions)))
        bias = bias.to(torch.promote_types(bias.dtype, problem.q.dtype))
        of_logits, of_biases = form.input.to(bias.dtype).chunk(2, dim=1)
        hidden = of_biases @ bias + form.input_bias.to(bias.dtype).unsqueeze(-1)
        pairs = PairTerm("mixing", (of_logits, hidden, form.output, form.output_bias))
        terms = replace(terms, bias_by_offset=bias, first=first - origin)
        return replace(record, terms=terms, pairs=pairs)
    # An offset is as far from 0 as from the origin, and the origin from 0.
    distances = abs(origin) + torch.arange(max(last - origin, origin - first) + 1)
    distances = distances.to(form.factor.dtype)
    tensors = (form.distance(distances), form.knots, form.slope, form.intercept, form.factor)
    return replace(record, pairs=PairTerm("distance", tensors))


LONG = 2048
"""Fewest keys for which computing the norms of queries and keys pays off."""


def narrowed(x: KernelProblem) -> KernelProblem:
    """The record with each head's band; unchanged if all heads need all offsets.

    Unless a constant table is the only term and queries see their own position, all do.
    """
    geometry, bias, keys = x.geometry, x.terms.bias_by_offset, x.k.shape[2]
    if keys < LONG or are_few(x.q) or x.dropout or x.softcap:
        return x
    if geometry.intervals is not None or geometry.period:
        return x
    if x.rotary.query_cosine is not None or not has_values(x.q):
        return x
    # Query i's own position is that of key i - shift.
    if not (geometry.shift <= 0 and x.q.shape[2] - 1 - geometry.shift < keys):
        return x
    if bias is None or not x.terms.bias_only or (bias.requires_grad and torch.is_grad_enabled()):
        return x
    bands, all_offsets = _bands(x, bias), geometry.highest - geometry.lowest
    if int((bands[:, 1] - bands[:, 0]).min()) == all_offsets:
        return x
    return replace(x, geometry=replace(geometry, bands=bands))


def _bands(x: KernelProblem, bias: Float[Tensor, "H W"]) -> Int[Tensor, "H 2"]:
    """Smallest and largest offset with a non-negligible weight, for each head."""
    origin = x.terms.first
    first, last = x.geometry.lowest, x.geometry.highest
    longest = [y.detach().norm(dim=-1).amax((0, 2)).double() for y in (x.q, x.k)]
    of_keys = longest[1].repeat_interleave(x.q.shape[1] // x.k.shape[1])
    most = 2 * x.scale * longest[0] * of_keys
    precision = torch.finfo(torch.promote_types(x.q.dtype, torch.float32)).eps
    limit = math.log(precision / 8 / x.k.shape[2])
    shown = bias[:, first - origin : last - origin + 1].detach().double()
    weighs = shown - bias[:, -origin, None] + most.unsqueeze(-1) >= limit  # [H, offsets]
    low, high = (side.int().argmax(-1) for side in (weighs, weighs.flip(-1)))
    return torch.stack([first + low, last - high], dim=-1).int()
