"""Bands of offsets in which a constant table leaves pairs a weight, by groups of heads.

A query that sees its own position has a logit of at least ``bias[0] - B`` there, B = scale · max‖q‖
· max‖k‖ of the head; a pair at offset Δ has one of at most ``bias[Δ] + B``. So its weight is at
most ``e^(bias[Δ] - bias[0] + 2B)``. Where that is below ``eps / (8 K)``, all such pairs of a query
together weigh less than an eighth of the rounding of the output: they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from posenc.attention.backends.common.base import Problem, Result
from posenc.attention.backends.native.operands import Operands
from posenc.attention.backends.native.place import Place
from posenc.attention.lowering import is_constant_table, repeat_heads
from posenc.encoding import StructuredScore
from posenc.runtime import has_values

LONG = 2048
"""Keys from which on norms of queries and keys cost little beside the pairs that they save."""

NARROW = 0.75
"""Heads get a call of their own if they need no more than this share of the offsets."""

Band = tuple[int, int]


def head_bands(
    problem: Problem, terms: Sequence[StructuredScore], x: Operands, place: Place
) -> list[tuple[slice, Band]]:
    """Heads in groups, and the band of each; none where all need the whole band of the grid."""
    q, k, (first, last) = problem.q, problem.k, place.band
    # Query i's own position is that of key i - shift.
    sees_itself = place.shift <= 0 and q.shape[2] - 1 - place.shift < k.shape[2]
    plain = problem.rotation is None and problem.whole is None and not problem.dropout
    if k.shape[2] < LONG or place.intervals is not None or not (sees_itself and plain):
        return []
    if x.line is None or not all(map(is_constant_table, terms)) or not has_values(q):
        return []
    longest = [y.detach().norm(dim=-1).amax((0, 2)) for y in (q, repeat_heads(k, problem.heads))]
    most = 2 * problem.scale * longest[0].double() * longest[1].double()
    limit = math.log(torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps / 8 / k.shape[2])
    line = x.line[:, first - x.first : last - x.first + 1].detach().double()
    kept = line - x.line[:, -x.first, None] + most.unsqueeze(-1) >= limit  # [H, offsets]
    lows = kept.int().argmax(-1).tolist()
    highs = (last - kept.flip(-1).int().argmax(-1)).tolist()
    bands = [(first + low, high) for low, high in zip(lows, highs, strict=True)]
    full = NARROW * (last - first)
    bands = [band if band[1] - band[0] <= full else place.band for band in bands]
    return [] if all(band == place.band for band in bands) else list(_grouped(bands))


def _grouped(bands: Sequence[Band]) -> Iterator[tuple[slice, Band]]:
    begin = 0
    for band, same in groupby(bands):
        end = begin + len(list(same))
        yield slice(begin, end), band
        begin = end


def of_heads(problem: Problem, x: Operands, heads: slice) -> tuple[Problem, Operands]:
    """The problem of some heads, and its operands, which are a line alone."""
    assert x.line is not None
    k, v = (repeat_heads(y, problem.heads)[:, heads] for y in (problem.k, problem.v))
    line = x.line if len(x.line) == 1 else x.line[heads]
    return replace(problem, q=problem.q[:, heads], k=k, v=v), replace(x, line=line)


def join_heads(results: Sequence[Result]) -> Result:
    """Attention of all heads, from that of ranges of them in order."""
    sums = [result.lse for result in results if result.lse is not None]
    output = torch.cat([result.output for result in results], dim=1)
    return Result(output, torch.cat(sums, dim=1) if sums else None)
