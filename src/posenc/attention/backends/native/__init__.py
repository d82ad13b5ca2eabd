"""Compiled CPU kernels for attention with structured terms, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Backend, Plan, Problem, Result, Unsupported
from posenc.attention.backends.native.build import missing
from posenc.attention.backends.native.fading import head_bands, join_heads, of_heads
from posenc.attention.backends.native.heads import (
    BlocksApart,
    RowsApart,
    takes_blocks_apart,
    takes_rows_apart,
)
from posenc.attention.backends.native.kernel_call import ITEMS
from posenc.attention.backends.native.op import NativeAttention, NativePart, native
from posenc.attention.backends.native.operands import (
    Operands,
    fused_form,
    image_operands,
    operands,
    terms_of,
)
from posenc.attention.backends.native.pairs import DESCRIPTIONS, Fused, fused
from posenc.attention.backends.native.place import Place
from posenc.attention.backends.native.rotation import rotate, serves_inside
from posenc.attention.images import serves_axes, serves_images
from posenc.attention.lowering import add_rows, repeat_heads, without_rows
from posenc.encoding import BlockTransforms, DistanceFunction, FusedScore, Rotation, StructuredScore
from posenc.runtime import is_transformed, needs_dispatch

__all__ = ["Native"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ON_CPU = Unsupported("its kernels run on CPUs alone")


class Native(Backend):
    """Online softmax over tiles, in C++, with terms read by spans of the offset.

    Regular grids, documents and padding in whole stretches, and tables between whole images.
    Gradients of everything, dropout included. Results are the same for any number of threads.
    """

    name = "native"
    fuse_rotations = True
    rotates_compiled = True
    differentiates_parts = True

    def unavailable(self, device: torch.device) -> Unsupported | None:
        if device.type != "cpu":
            return ON_CPU
        reason = missing()
        return None if reason is None else Unsupported(reason)

    def plan(self, problem: Problem) -> Plan | Unsupported:
        if problem.q.device.type != "cpu":
            return ON_CPU
        if is_transformed():
            return Unsupported("its kernels know no transforms of torch.func")
        if torch.compiler.is_exporting():
            return Unsupported("other runtimes do not have its kernels")
        if problem.q.dtype not in DTYPES:
            return Unsupported(f"its kernels do not take {problem.q.dtype}")
        grid = problem.grid
        if serves_images(grid, problem.lowered) or (
            not torch.compiler.is_compiling() and serves_axes(grid, problem.lowered)
        ):
            return Plan("compiled tiles with terms by image offset", partial(_images, problem))
        place = Place.of(grid)
        return place if isinstance(place, Unsupported) else _plan(problem, place)


def _plan(problem: Problem, place: Place) -> Plan | Unsupported:
    terms = terms_of(problem, place.domain)
    if terms is not None and place.intervals is None and takes_rows_apart(problem):
        how = "compiled tiles, terms of a few heads at a time (memory linear in the length)"
        return Plan(how, partial(_attend_rows_apart, replace(problem, lowered=None), place))
    if terms is not None:
        how = "compiled tiles, terms read by spans of the offset (memory linear in the length)"
        return Plan(how, partial(_attend, problem, terms, place, None))
    form, terms = fused_form(problem)
    if form is None or terms is None or (terms and not isinstance(form, DistanceFunction)):
        return Unsupported("its score or value part has no form that the kernels take")
    how = f"compiled tiles with {DESCRIPTIONS[type(form)]} (memory linear in the length)"
    return Plan(how, partial(_attend, problem, terms, place, form))


def _attend(
    problem: Problem,
    terms: tuple[StructuredScore, ...],
    place: Place,
    form: FusedScore | None,
    *,
    lse: bool,
) -> Result:
    if isinstance(form, BlockTransforms) and problem.whole is None and takes_blocks_apart(form):
        whole, seed = _of_equal_heads(problem), _draw_seed(problem)
        call = BlocksApart(whole, place, seed, replace(form, query=whole.q, key=whole.k))
        return _result(problem, call(form.parameters), (), lse=lse)
    x = operands(terms, problem, place.domain, place.reach)
    pairs = None if form is None else fused(form, place, problem.grid, problem.q.dtype)
    if pairs is not None and pairs.left is not None:
        tokens = pairs.left.tokens
        left = None if tokens is problem.q else tokens
        x = replace(x, left=left, left_rows=pairs.left.rows)
    if pairs is not None and pairs.line is not None:
        x = replace(x, line=pairs.line, first=place.domain[0])
    bands = head_bands(problem, terms, x, place) if pairs is None else []
    if bands:
        parts = ((*of_heads(problem, x, heads), replace(place, band=band)) for heads, band in bands)
        return join_heads([_run(part, (), y, at, None, lse=lse) for part, y, at in parts])
    return _run(problem, terms, x, place, pairs, lse=lse)


def _images(problem: Problem, *, lse: bool) -> Result:
    assert problem.lowered is not None
    x = image_operands(problem.lowered, problem)
    rows, columns = problem.grid.query.extent  # type: ignore[misc]
    shift = (rows - 1) * (x.period + x.jump) + columns - 1
    return _run(problem, problem.lowered, x, Place((0, 0), (0, 0), shift), None, lse=lse)


def _run(
    problem: Problem,
    terms: tuple[StructuredScore, ...],
    x: Operands,
    place: Place,
    pairs: Fused | None,
    *,
    lse: bool,
) -> Result:
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    rotation = problem.rotation
    if rotation is not None and not serves_inside(rotation, q, k):
        (q, k), rotation = rotate(rotation, q, k), None
    if pairs is not None and pairs.tokens is not None:
        (q, k), scale = pairs.tokens, 1.0
        q, k, v = (x.to(q.dtype) for x in (q, k, repeat_heads(v, problem.heads)))
    graded = torch.is_grad_enabled()
    adjacent = rotation is not None and rotation.pairing == "adjacent"
    tensors = (
        q,
        k,
        v,
        x.q_factor,
        x.k_factor,
        x.line,
        x.column,
        x.left,
        x.left_rows,
        x.right,
        x.right_rows,
        x.value_rows,
        x.bucket,
        place.counted_intervals(),
    )
    rest = (
        _rotary_factors(rotation),
        scale,
        [*place.numbers(), x.first - place.origin, x.period, x.jump, ITEMS, adjacent],
        problem.dropout,
        _draw_seed(problem),
        [graded and term is not None and term.requires_grad for term in (x.line, x.column)],
        "" if pairs is None else pairs.kind,
    )
    of_pairs = () if pairs is None else pairs.tensors
    if problem.whole is not None:
        sums = without_rows(problem.whole.lse, terms).double().contiguous()
        given = NativePart.apply(  # type: ignore[no-untyped-call]
            problem.whole.output, sums, *tensors, *rest, *of_pairs
        )
        return Result(given, None)
    if needs_dispatch(*tensors, *of_pairs):
        return _result(problem, native(*tensors, list(of_pairs), *rest), terms, lse=lse)
    found = NativeAttention.apply(*tensors, *rest, *of_pairs)  # type: ignore[no-untyped-call]
    return _result(problem, found, terms, lse=lse)


def _attend_rows_apart(problem: Problem, place: Place, *, lse: bool) -> Result:
    score = problem.encoding.score
    assert score is not None
    call = RowsApart(_of_equal_heads(problem), place, _draw_seed(problem))
    return _result(problem, call(list(score.parameters())), (), lse=lse)


def _of_equal_heads(problem: Problem) -> Problem:
    k, v = (repeat_heads(x, problem.heads) for x in (problem.k, problem.v))
    return replace(problem, k=k, v=v)


def _result(
    problem: Problem, found: tuple[Tensor, Tensor], terms: tuple[StructuredScore, ...], *, lse: bool
) -> Result:
    output = found[0].to(problem.v.dtype)
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    return Result(output, add_rows(found[1], terms).to(wide) if lse else None)


def _rotary_factors(rotation: Rotation | None) -> list[Tensor]:
    """Cosines and sines of queries, and of keys; none for no rotation."""
    if rotation is None:
        return []
    return [factor.detach() for factor in (*rotation.query, *rotation.key)]


def _draw_seed(problem: Problem) -> int:
    return int(torch.randint(2**31, ()).item()) if problem.dropout else 0


ENTRY = Native()
