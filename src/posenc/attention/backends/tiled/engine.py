"""Forward and backward over a whole regular problem: which heads together, and on which cores.

Heads that meet nothing but an offset bias go through every operator together, on all cores.
Tiles with more in them stay in a core's cache if each core has heads of its own; and so have heads
that see different bands, since one alone would leave cores idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled import near
from posenc.attention.backends.tiled.band import Band
from posenc.attention.backends.tiled.operands import Operands, reversed_rows
from posenc.attention.backends.tiled.passes import BackwardPass, ForwardPass, Saved, fused
from posenc.attention.backends.tiled.sdpa_cpu import Partial, sdpa_cpu_backward, sdpa_cpu_forward
from posenc.attention.backends.tiled.tiles import Dropout
from posenc.attention.backends.tiled.workers import side_by_side

TOGETHER = 8
"""Heads at a time at most that all cores share."""

LANES = 4
"""Heads at a time at most on one core, so that a tile of all of them stays in its cache."""

Item = TypeVar("Item")

NARROW = 0.75
"""A head is worth calls of its own if it needs no more than this share of the places."""


@dataclass(frozen=True)
class _Lane:
    """Heads ``begin`` to ``end`` that are done together, in all batch rows, and what they see."""

    begin: int
    end: int
    band: Band


def forward(
    x: Operands, band: Band, dropout: Dropout | None, *, bias_wanted: bool, keep_ahead: bool
) -> Saved:
    """Attention of all queries.

    Args:
        bias_wanted: whether the gradient of the offset bias will be wanted.
        keep_ahead: keep what the backward pass will need for an outermost bucket ahead.
    """
    lanes = _lanes(x, band, dropout, bias_wanted=bias_wanted)
    apart = bias_wanted and near.serves(x, band, dropout)
    keep_ahead = keep_ahead and (apart or not x.table_only)
    keep_ahead = keep_ahead and band.ahead is not None and band.behind is not None
    if not keep_ahead and _one_call(x, band, lanes, dropout):
        block = x.block(0, band.queries)
        part = sdpa_cpu_forward(block.q, x.k, x.v, x.whole_mask())
        return Saved(part.block(0, band.queries), None)
    output = x.v.new_empty(*x.q.shape[:3], x.v.shape[-1])
    saved = Saved(Partial(output, x.q.new_empty(x.q.shape[:3])), None)
    if keep_ahead:
        nothing = torch.full_like(saved.whole.lse, -torch.inf)
        saved = Saved(saved.whole, Partial(torch.zeros_like(output), nothing))

    def work(lane: _Lane) -> None:
        heads = (lane.begin, lane.end)
        for batch in range(x.q.shape[0]):
            number = batch * x.q.shape[1] + lane.begin
            part = saved.part(batch, heads)
            ForwardPass(x.part(batch, heads), lane.band, part, dropout, number).run()

    _each(work, lanes, apart=_side_by_side(x, lanes))
    return saved


def backward(
    x: Operands,
    band: Band,
    saved: Saved,
    gradient: Float[Tensor, "B H Q E"],
    dropout: Dropout | None,
    *,
    bias_wanted: bool,
) -> Operands:
    """Gradients of all operands, given that of the output.

    Args:
        bias_wanted: whether the gradient of the offset bias is wanted; far less has to be done
            without it.
    """
    lanes = _lanes(x, band, dropout, bias_wanted=bias_wanted)
    apart = bias_wanted and near.serves(x, band, dropout)
    if (apart or not bias_wanted) and _one_call(x, band, lanes, dropout):
        block, whole = x.block(0, band.queries), saved.whole.block(0, band.queries)
        given = reversed_rows(gradient, 0, band.queries)
        q, k, v = sdpa_cpu_backward(given, block.q, x.k, x.v, whole, x.whole_mask())
        bias = x.bias_by_offset if apart else None
        bias_sums = None if bias is None else torch.zeros_like(bias)
        into = Operands(reversed_rows(q, 0, band.queries), k, v, bias_by_offset=bias_sums)
        del block, whole, given, q
    else:
        into = x.zeros(bias_wanted=bias_wanted)
        # Rows that all heads share are summed by each lane apart, then in order.
        sums = [into, *(into.own_rows() for _ in lanes[1:])]

        def work(each: tuple[_Lane, Operands]) -> None:
            lane, summed = each
            heads = (lane.begin, lane.end)
            for batch in range(x.q.shape[0]):
                mine = summed.part(batch, heads)
                BackwardPass(
                    x.part(batch, heads),
                    lane.band,
                    saved.part(batch, heads),
                    gradient[batch : batch + 1, slice(*heads)],
                    replace(mine, bias_by_offset=None) if apart else mine,
                    dropout,
                    batch * x.q.shape[1] + lane.begin,
                ).run()

        each = list(zip(lanes, sums, strict=True))
        _each(work, each, apart=_side_by_side(x, lanes))
        for other in sums[1:]:
            into.add_rows(other)
    if apart:
        for lane in lanes:
            heads = (lane.begin, lane.end)
            for batch in range(x.q.shape[0]):
                near.add_bias_gradient(
                    x.part(batch, heads),
                    band,
                    saved.part(batch, heads),
                    gradient[batch : batch + 1, slice(*heads)],
                    into.part(batch, heads),
                )
    return into


def _each(work: Callable[[Item], None], items: Sequence[Item], *, apart: bool) -> None:
    """Go through lanes: side by side, or one by one with all cores at each."""
    if apart:
        side_by_side(work, items)
    else:
        for item in items:
            work(item)


def _side_by_side(x: Operands, lanes: Sequence[_Lane]) -> bool:
    different = any(lane.band != lanes[0].band for lane in lanes)
    return x.q.device.type == "cpu" and (different or not x.table_only)


def _one_call(x: Operands, band: Band, lanes: Sequence[_Lane], dropout: Dropout | None) -> bool:
    """True if one call of the fused kernel computes everything."""
    if not (fused(x, dropout) and x.table_only and band.whole):
        return False
    return all(lane.band == band for lane in lanes)


def _lanes(x: Operands, band: Band, dropout: Dropout | None, *, bias_wanted: bool) -> list[_Lane]:
    """All heads, in groups that are done together.

    What is dropped depends on the groups: those are then the same with any number of threads, which
    may not be the same on the way back.
    """
    most = TOGETHER
    if not x.table_only and x.q.device.type == "cpu":
        threads = torch.get_num_threads() if dropout is None else 1
        most = min(LANES, -(-x.q.shape[1] // threads))
    return [
        _Lane(begin, min(begin + most, last), part)
        for (first, last), part in _narrowed(x, band, constant=not bias_wanted and dropout is None)
        for begin in range(first, last, most)
    ]


def _narrowed(x: Operands, band: Band, *, constant: bool) -> list[tuple[tuple[int, int], Band]]:
    """Heads in groups, each with the part of the band in which a pair can matter to it.

    A query that sees its own position has a logit of at least ``bias[zero] - B`` there,
    B = max‖q‖ · max‖k‖ with q scaled; a pair at place c has one of at most ``bias[c] + B``. So the
    weight of the pair is at most ``e^(bias[c] - bias[zero] + 2B)``. Where that is below
    ``eps / (8 K)``, all such pairs of a query together weigh less than an eighth of the rounding
    of the output.
    """
    heads, zero = x.q.shape[1], band.zero
    whole = [((0, heads), band)]
    sees_itself = zero >= band.queries - 1 and zero <= band.keys - 1
    if not constant or x.bias_by_offset is None or not x.table_only or not sees_itself:
        return whole
    largest = x.scale * x.q.norm(dim=-1).amax((0, 2)) * x.k.norm(dim=-1).amax((0, 2))
    limit = math.log(torch.finfo(x.bias_by_offset.dtype).eps / (8 * band.keys))
    kept = (
        x.bias_by_offset - x.bias_by_offset[:, zero : zero + 1] + 2 * largest.unsqueeze(-1) >= limit
    )
    first = kept.int().argmax(-1).tolist()
    last = (kept.shape[-1] - 1 - kept.flip(-1).int().argmax(-1)).tolist()
    groups: list[tuple[tuple[int, int], Band]] = []
    for head, (low, high) in enumerate(zip(first, last, strict=True)):
        narrow = replace(band, first=max(band.first, low), last=min(band.last, high))
        if narrow.last - narrow.first > NARROW * (band.last - band.first):
            narrow = band
        if groups and groups[-1][1] == narrow:
            groups[-1] = ((groups[-1][0][0], head + 1), narrow)
        else:
            groups.append(((head, head + 1), narrow))
    return groups
