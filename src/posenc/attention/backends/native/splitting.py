"""Problems in several calls of the kernels: by bands of pairs, without special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from posenc.attention.backends.common.base import Result
from posenc.attention.backends.native.rotation import rotate_one
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.encoding import Encoding, RotatedBand, Rotation
from posenc.encoding.prepared import reused_of_grid

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
