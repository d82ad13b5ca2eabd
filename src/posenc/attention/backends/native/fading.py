"""Bands of offsets in which a constant table leaves pairs a weight, by groups of heads.

A query that sees its own position has a logit of at least ``bias[0] - B`` there, B = scale · max‖q‖
· max‖k‖ of the head; a pair at offset Δ has one of at most ``bias[Δ] + B``. So its weight is at
most ``e^(bias[Δ] - bias[0] + 2B)``. Where that is below ``eps / (8 K)``, all such pairs of a query
together weigh less than an eighth of the rounding of the output: they are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.fused import are_few
from posenc.attention.problem.record import KernelProblem
from posenc.runtime import has_values

LONG = 2048
"""Keys from which on norms of queries and keys cost little beside the pairs that they save."""

NARROW = 0.75
"""Heads get a call of their own if they need no more than this share of the offsets."""

Band = tuple[int, int]


def by_bands(x: KernelProblem) -> list[KernelProblem]:
    """The problem in groups of heads, in order, each with its band; none where all need all."""
    band = x.geometry.lowest, x.geometry.highest
    if not _serves(x):
        return []
    bands = _bands(x)
    full = NARROW * (band[1] - band[0])
    bands = [found if found[1] - found[0] <= full else band for found in bands]
    if all(found == band for found in bands):
        return []
    parts, begin = [], 0
    for found, same in groupby(bands):
        heads = slice(begin, begin + len(list(same)))
        parts.append(_of_heads(x, heads, found))
        begin = heads.stop
    return parts


def _serves(x: KernelProblem) -> bool:
    """True if a constant table is the only term, and queries see their own position."""
    geometry, terms, keys = x.geometry, x.terms, x.k.shape[2]
    if keys < LONG or are_few(x.q) or x.dropout or x.softcap:
        return False
    if geometry.intervals is not None or geometry.period:
        return False
    if x.rotary.query_cosine is not None or not has_values(x.q):
        return False
    # Query i's own position is that of key i - shift.
    if not (geometry.shift <= 0 and x.q.shape[2] - 1 - geometry.shift < keys):
        return False
    bias = terms.bias_by_offset
    return terms.bias_only and not (
        torch.is_grad_enabled() and bias is not None and bias.requires_grad
    )


def _bands(x: KernelProblem) -> list[Band]:
    """The smallest and largest offset that may weigh anything, of each head."""
    bias, origin = x.terms.bias_by_offset, x.terms.first
    first, last = x.geometry.lowest, x.geometry.highest
    assert bias is not None
    longest = [y.detach().norm(dim=-1).amax((0, 2)).double() for y in (x.q, x.k)]
    of_keys = longest[1].repeat_interleave(x.q.shape[1] // x.k.shape[1])
    most = 2 * x.scale * longest[0] * of_keys
    precision = torch.finfo(torch.promote_types(x.q.dtype, torch.float32)).eps
    limit = math.log(precision / 8 / x.k.shape[2])
    shown = bias[:, first - origin : last - origin + 1].detach().double()
    kept = shown - bias[:, -origin, None] + most.unsqueeze(-1) >= limit  # [H, offsets]
    lows = kept.int().argmax(-1).tolist()
    highs = kept.flip(-1).int().argmax(-1).tolist()
    return [(first + low, last - high) for low, high in zip(lows, highs, strict=True)]


def _of_heads(x: KernelProblem, heads: slice, band: Band) -> KernelProblem:
    bias = x.terms.bias_by_offset
    assert bias is not None
    k, v = (_groups_of(y, heads, x.q.shape[1] // y.shape[1]) for y in (x.k, x.v))
    terms = replace(x.terms, bias_by_offset=bias if len(bias) == 1 else bias[heads])
    geometry = replace(x.geometry, lowest=band[0], highest=band[1])
    sinks = None if x.sinks is None else x.sinks[:, heads]
    return replace(x, q=x.q[:, heads], k=k, v=v, terms=terms, geometry=geometry, sinks=sinks)


def _groups_of(
    x: Float[Tensor, "B G K D"], heads: slice, size: int
) -> Float[Tensor, "B heads_or_groups K D"]:
    """Keys or values of some query heads, ``size`` of which share each.

    A view of their groups if these are whole, or one; else a copy for each head.
    """
    groups = slice(heads.start // size, -(-heads.stop // size))
    whole = heads.start % size == heads.stop % size == 0
    if whole or groups.stop - groups.start == 1:
        return x[:, groups]
    return x[:, torch.arange(heads.start, heads.stop, device=x.device) // size]
