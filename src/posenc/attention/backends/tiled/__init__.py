"""Every method in memory that grows with the length, forward and backward, on any device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from posenc.attention.backends.common.base import (
    Backend,
    Plan,
    Problem,
    Result,
    Unsupported,
    Whole,
    join_queries,
)
from posenc.attention.backends.tiled.blockwise import attend_blockwise
from posenc.attention.backends.tiled.images import TiledImagePart, tiled_image
from posenc.attention.backends.tiled.op import TiledPart, tiled
from posenc.attention.images import image_table, serves_images
from posenc.attention.lowering import add_rows, lower, part_of, repeat_heads, without_rows
from posenc.attention.regular import Regular, read_offsets
from posenc.attention.runs import Run, regular_runs
from posenc.encoding import StructuredScore
from posenc.runtime import is_transformed

__all__ = ["Tiled"]


class Tiled(Backend):
    """Structured terms over regular grids in tiles; all else by definition, in blocks of queries.

    Packed and padded layouts are regular document by document. Gradients of everything, dropout
    included. Under ``torch.func`` and forward-mode
    differentiation everything goes by definition, in blocks of queries.
    """

    name = "tiled"
    differentiates_parts = True
    keyed_dropout = True

    def plan(self, problem: Problem) -> Plan | Unsupported:
        if problem.keyed is not None:
            return _by_blocks(problem)
        if _regular(problem):
            how = "tiles with the terms of every offset (memory linear in the length)"
            return Plan(how, partial(_attend_regular, problem))
        if _images(problem):
            how = "blocks of image rows with the table of their offsets"
            return Plan(how, partial(_attend_images, problem))
        if torch.compiler.is_compiling():
            return Unsupported(
                "inside a compiled graph only regular layouts can be tiled, outside any transform "
                "of torch.func"
            )
        runs = _runs(problem)
        if runs is not None:
            how = "each document by itself, in tiles (memory linear in the length)"
            return Plan(how, partial(_attend_runs, problem, runs))
        return _by_blocks(problem)


def _by_blocks(problem: Problem) -> Plan:
    """The definition in blocks of queries."""
    score, how = problem.encoding.score, "the definition, some queries at a time"
    if score is not None and score.keys_by_keys:
        how += " (its score takes memory K×K)"
    elif is_transformed():
        how += ", which torch.func can transform"
    else:
        how += " (memory linear in the length)"
    return Plan(how, partial(attend_blockwise, problem), differentiable_twice=True)


def _regular(problem: Problem) -> bool:
    grid = problem.grid
    if is_transformed():
        return False
    return grid.shift is not None and not grid.segmented and problem.lowered is not None


def _images(problem: Problem) -> bool:
    """True if tables between whole images are the only terms, on the fused kernel's device."""
    if problem.q.device.type != "cpu" or problem.dropout or is_transformed():
        return False
    if problem.q.shape[-1] != problem.v.shape[-1]:
        return False
    return serves_images(problem.grid, problem.lowered)


def _runs(problem: Problem) -> dict[tuple[Run, ...], list[int]] | None:
    """Documents of a segmented grid, each of which is regular.

    None where there are none at all, so that gradients of zero reach all that is given.
    """
    grid = problem.grid
    alone = grid.shift is not None and not grid.segmented
    if alone or is_transformed() or problem.dropout or problem.q.device.type != "cpu":
        return None
    if not _lowerable(problem):
        return None
    runs = regular_runs(grid)
    return runs if runs is None or any(runs) else None


def _lowerable(problem: Problem) -> bool:
    score = problem.encoding.score
    return score is None or not score.replaces_product


def _attend_regular(problem: Problem, *, lse: bool) -> Result:
    assert problem.lowered is not None
    heads, wide = problem.heads, torch.promote_types(problem.q.dtype, torch.float32)
    terms = read_offsets(problem.lowered, problem.grid, device=problem.q.device)
    if terms.column is not None:  # float64 where they are sums that grow with the length
        wide = torch.promote_types(wide, terms.column.dtype)
    q, k, v = (x.to(wide) for x in (problem.q, problem.k, problem.v))
    k, v, scale = repeat_heads(k, heads), repeat_heads(v, heads), problem.scale
    value_rows = terms.value_rows
    if terms.factors:
        q, k, v = _widen(q * scale, k, v, terms)
        scale = 1.0
        if value_rows is not None:
            value_rows = torch.nn.functional.pad(
                value_rows, (0, v.shape[-1] - value_rows.shape[-1])
            )
    bias_by_offset = None if terms.bias_by_offset is None else terms.bias_by_offset.to(wide)
    band = [
        problem.grid.require_shift(),
        int(problem.grid.causal),
        -1 if problem.grid.window is None else problem.grid.window,
        -1 if terms.max_distance is None or problem.whole is not None else terms.max_distance,
    ]
    batch = q.shape[0]
    inputs = (
        q,
        k,
        v,
        bias_by_offset,
        None if terms.left is None else terms.left.to(wide).expand(batch, -1, -1, -1),
        _contiguous(terms.left_rows, wide),
        None if terms.right is None else terms.right.to(wide).expand(batch, -1, -1, -1),
        _contiguous(terms.right_rows, wide),
        None if terms.column is None else terms.column.to(wide).expand(batch, -1, -1),
        _contiguous(value_rows, wide),
        scale,
        band,
        problem.dropout,
        int(torch.randint(2**31, ()).item()) if problem.dropout else 0,
        bias_by_offset is not None and bias_by_offset.requires_grad and torch.is_grad_enabled(),
        not problem.grid.causal and _wants_sums(bias_by_offset, terms),
    )
    if problem.whole is not None:
        sums = without_rows(problem.whole.lse, problem.lowered).to(wide)
        whole = problem.whole.output.to(wide)
        whole = torch.nn.functional.pad(whole, (0, v.shape[-1] - whole.shape[-1]))
        given = TiledPart.apply(whole, sums, *inputs)  # type: ignore[no-untyped-call]
        return Result(given[..., : problem.v.shape[-1]].to(problem.v.dtype), None)
    output, row_lse, *_ = tiled(*inputs)
    output = output[..., : problem.v.shape[-1]].to(problem.v.dtype)
    return Result(output, add_rows(row_lse, problem.lowered) if lse else None)


def _attend_images(problem: Problem, *, lse: bool) -> Result:
    assert problem.lowered is not None
    grid, heads = problem.grid, problem.heads
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    table = image_table(problem.lowered, grid, device=problem.q.device).to(wide).contiguous()
    q, k, v = (x.to(wide) for x in (problem.q, problem.k, problem.v))
    inputs = (
        (q * problem.scale).flip(2),
        repeat_heads(k, heads),
        repeat_heads(v, heads),
        table,
        [*(grid.query.extent or ()), *(grid.key.extent or ())],
        table.requires_grad and torch.is_grad_enabled(),
    )
    # Queries come back from the last to the first.
    if problem.whole is not None:
        given = (problem.whole.output, without_rows(problem.whole.lse, problem.lowered))
        output = TiledImagePart.apply(*(x.to(wide).flip(2) for x in given), *inputs)  # type: ignore[no-untyped-call]
        return Result(output.flip(2).to(problem.v.dtype), None)
    output, row_lse = tiled_image(*inputs)
    sums = add_rows(row_lse.flip(2), problem.lowered) if lse else None
    return Result(output.flip(2).to(problem.v.dtype), sums)


def _contiguous(rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if rows is None else rows.to(dtype).contiguous()


def _wants_sums(bias_by_offset: Tensor | None, terms: Regular) -> bool:
    """True if the backward pass needs the sum of the logits' gradients of each query."""
    given = (bias_by_offset, terms.left, terms.left_rows)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def _widen(q: Tensor, k: Tensor, v: Tensor, terms: Regular) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank terms as extra columns; then all of one width, as the fused kernel requires."""
    size = (*q.shape[:2], -1, -1)
    q = torch.cat([q, *(f.query.to(q).expand(size) for f in terms.factors)], dim=-1)
    k = torch.cat([k, *(f.key.to(k).expand(size) for f in terms.factors)], dim=-1)
    missing = q.shape[-1] - v.shape[-1]
    return q, k, torch.nn.functional.pad(v, (0, missing)) if missing > 0 else v


def _attend_runs(problem: Problem, runs: dict[tuple[Run, ...], list[int]], *, lse: bool) -> Result:
    """Each document by itself; queries in none of them give zeros."""
    batch = problem.q.shape[0]
    rows: list[Result | None] = [None] * batch
    every = len(runs) == 1
    for documents, members in runs.items():
        chosen = list(range(batch)) if every else members
        output, sums = _attend_row(problem, chosen, documents, lse=lse)
        for place, row in enumerate(chosen):
            rows[row] = Result(output[place], None if sums is None else sums[place])
    found = [row for row in rows if row is not None]
    parts = [row.lse for row in found if row.lse is not None]
    return Result(torch.stack([row.output for row in found]), torch.stack(parts) if parts else None)


def _attend_row(
    problem: Problem, rows: list[int], documents: tuple[Run, ...], *, lse: bool
) -> Result:
    """Some batch rows, which have the same documents."""
    whole = None if problem.whole is None else Whole(*(x[rows] for x in problem.whole))
    part = replace(problem, q=problem.q[rows], k=problem.k[rows], v=problem.v[rows], whole=whole)
    pieces, at = [], 0
    for run in documents:
        if run.query[0] > at:
            pieces.append(_nothing(part, at, run.query[0], lse=lse))
        pieces.append(_attend_run(part, _terms(problem, rows, run), run, lse=lse))
        at = run.query[1]
    if at < problem.q.shape[2]:
        pieces.append(_nothing(part, at, problem.q.shape[2], lse=lse))
    return join_queries(pieces)


def _terms(problem: Problem, rows: list[int], run: Run) -> tuple[StructuredScore, ...] | None:
    """The structured form of one document; None for one that it has only by itself."""
    if problem.lowered is None:
        return None
    return part_of(problem.lowered, rows, slice(*run.query), slice(*run.key))


def _attend_run(
    problem: Problem, lowered: tuple[StructuredScore, ...] | None, run: Run, *, lse: bool
) -> Result:
    q, (k, v) = (
        problem.q[:, :, slice(*run.query)],
        (x[:, :, slice(*run.key)] for x in (problem.k, problem.v)),
    )
    grid = run.grid(problem.grid)
    if lowered is None:
        scale, width = problem.scale, v.shape[3]
        lowered = lower(problem.encoding, q, k, grid, scale=scale, value_dim=width)
    whole = problem.whole
    if whole is not None:
        whole = Whole(*(x[:, :, slice(*run.query)] for x in whole))
    part = replace(problem, q=q, k=k, v=v, grid=grid, lowered=lowered, whole=whole)
    if lowered is None:
        return attend_blockwise(part, lse=lse)
    return _attend_regular(part, lse=lse)


def _nothing(problem: Problem, begin: int, end: int, *, lse: bool) -> Result:
    """Zeros for queries that see no key."""
    size = (*problem.q.shape[:2], end - begin)
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    sums = problem.q.new_full(size, -torch.inf, dtype=wide) if lse else None
    return Result(problem.v.new_zeros(*size, problem.v.shape[-1]), sums)


ENTRY = Tiled()
