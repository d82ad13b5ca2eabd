"""Problems in several calls of the kernels: by bands of pairs, without special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from posenc.attention.backends.common.base import Compute, Result
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.backends.native.rotation import rotate_one
from posenc.attention.problem.images import serves_images
from posenc.attention.problem.lowering import lower
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.encoding import Encoding, RotatedBand, Rotation
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid
from posenc.layout import Layout

PLAIN = Encoding()

BandProblem = tuple[Problem, Offsets]


def problems_by_band(problem: Problem) -> list[BandProblem] | str:
    """A problem of plain rotations for each band with visible pairs, and its offsets.

    One of them has the sinks. A reason if the score part has no such form.
    """
    grid, score = problem.grid, problem.encoding.score
    graded = grid.query.positions.requires_grad or grid.key.positions.requires_grad
    if score is None or problem.encoding.value is not None or graded:
        return "its score or value part has no form that the kernels take"
    bands = reused_of_grid(score.bands, "bands", grid=grid, layers=(score,))
    if not bands:
        return "its score or value part has no form that the kernels take"
    if any(x.requires_grad for band in bands for x in band.query):
        return "it has no gradients of frequencies"
    problems: list[BandProblem] = []
    for band in bands:
        offsets = Offsets.of(replace(grid, window=band.window, intervals=band.intervals))
        if isinstance(offsets, str):
            return offsets
        begin, end = offsets.shown_keys(grid.query.length, grid.key.length)
        if begin < end or (band is bands[-1] and not problems):
            sinks = None if problems else problem.sinks
            problems.append(_of_band(replace(problem, sinks=sinks), band, offsets, begin, end))
    return problems


def _of_band(
    problem: Problem, band: RotatedBand, offsets: Offsets, begin: int, end: int
) -> BandProblem:
    """The problem of a band; for few queries, cut to the keys that are visible in it."""
    q, k, v, key = problem.q, problem.k, problem.v, band.key
    if begin < end and 4 * q.shape[2] <= k.shape[2]:
        k, v = k[:, :, begin:end], v[:, :, begin:end]
        offsets = offsets.of_keys(problem.grid.query.length, begin, end)
        if key is not None and key[0].shape[2] > 1:
            key = key[0][:, :, begin:end], key[1][:, :, begin:end]
    rotation = None
    if key is None:
        q = rotate_one(q, band.query, band.pairing)
    else:
        rotation = Rotation(band.query, key, band.pairing)
    problem = replace(problem, q=q, k=k, v=v, encoding=PLAIN, lowered=(), rotation=rotation)
    return replace(problem, source=None), offsets


def join_keys(results: Sequence[Result], *, lse: bool) -> Result:
    """Attention to all keys, from attention to disjoint sets of keys with their LSE."""
    if len(results) == 1:
        return results[0]
    sums = torch.stack([result.lse for result in results if result.lse is not None])
    nothing = sums.isneginf().all(0)
    finite = sums.masked_fill(nothing, 0.0)  # no -inf - -inf
    first, *others = results
    wide = torch.promote_types(first.output.dtype, torch.float32)
    weight, *weights = finite.softmax(0).unsqueeze(-1).to(wide)
    output = weight * first.output
    for weight, result in zip(weights, others, strict=True):
        output = torch.addcmul(output, weight, result.output)
    total = finite.logsumexp(0).masked_fill(nothing, -torch.inf) if lse else None
    return Result(output.to(first.output.dtype), total)


MOST = 16
"""Largest number of special tokens of a side; their pairs are computed by the definition."""


def problem_of_cells(problem: Problem) -> Problem | None:
    """The problem of two images without the special tokens before them.

    None where there are none before whole images, the parts do not compute each pair for itself, or
    the cells have no structured form that the kernels serve.
    """
    grid, parts = problem.grid, (problem.encoding.score, problem.encoding.value)
    sides = (grid.query, grid.key)
    before = _specials(grid)
    if before is None or not 0 < max(before) <= MOST or not grid.dense:
        return None
    if any(part is not None and not part.pairwise for part in parts):
        return None
    if torch.compiler.is_compiling() or any(side.positions.requires_grad for side in sides):
        return None
    if problem.global_softmax is not None or problem.sinks is not None:
        return None
    queries, keys = before
    x, cell_grid = problem.rotated, Grid(_cells(grid.query, queries), _cells(grid.key, keys))
    cells = _subproblem(x, cell_grid, slice(queries, None), slice(keys, None))
    width = x.v.shape[3]
    lowered = lower(x.encoding, cells.q, cells.k, cells.grid, scale=x.scale, value_dim=width)
    return replace(cells, lowered=lowered) if serves_images(cells.grid, lowered) else None


def attend_with_special_tokens(problem: Problem, attend_cells: Compute, *, lse: bool) -> Result:
    """Attention of special tokens and cells, given the computation among the cells."""
    before, query, key = _specials(problem.grid), problem.grid.query, problem.grid.key
    assert before is not None
    x, (queries, keys) = problem.rotated, before
    of_cells = attend_cells(lse=lse or keys > 0)
    if keys:
        special_keys = Grid(query.slice(queries, query.length), key.slice(0, keys))
        special_pairs = _subproblem(x, special_keys, slice(queries, None), slice(keys))
        of_cells = join_keys([of_cells, attend_by_definition(special_pairs, lse=True)], lse=lse)
    if not queries:
        return of_cells
    special_pairs = _subproblem(x, Grid(query.slice(0, queries), key), slice(queries), slice(None))
    special = attend_by_definition(special_pairs, lse=lse)
    output = torch.cat([special.output, of_cells.output], dim=2)
    if special.lse is None or of_cells.lse is None:
        return Result(output, None)
    return Result(output, torch.cat([special.lse, of_cells.lse.to(special.lse.dtype)], dim=2))


def _subproblem(problem: Problem, grid: Grid, queries: slice, keys: slice) -> Problem:
    q, k, v = problem.q[:, :, queries], problem.k[:, :, keys], problem.v[:, :, keys]
    return replace(problem, q=q, k=k, v=v, grid=grid, lowered=None, source=None)


def _specials(grid: Grid) -> tuple[int, int] | None:
    """Special tokens before the cells of both sides; None but for whole images."""
    query, key = grid.query, grid.key
    if query.extent is None or key.extent is None:
        return None
    (rows, columns), (key_rows, key_columns) = query.extent, key.extent
    return query.length - rows * columns, key.length - key_rows * key_columns


def _cells(layout: Layout, before: int) -> Layout:
    cells = layout.slice(before, layout.length)
    return replace(cells, special=None, extent=layout.extent)
