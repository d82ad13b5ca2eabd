"""A piecewise-linear function of the distance, added to the logits.

Its argument is a number by offset times a rate of the query. The pairs of a tile have arguments in
a range, which mostly lies within one piece: numbers grow ever slower with the distance. Only knots
inside the range are compared with the arguments, one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.memory import clip
from posenc.attention.backends.triton.kernels.windows import window_of_biases


@triton.jit
def rates_of(curve, b, at, length):
    """Rates ``[N]`` of the queries ``at``; those beyond their length are like the last."""
    return tl.load(curve.rates + b * curve.rates_row + tl.minimum(at, length - 1))


@triton.jit
def _pieces_between(
    curve, b, queries_at, start, count, queries: tl.constexpr, entries: tl.constexpr
):
    """The pieces of the least and of the largest argument of a tile.

    Args:
        queries_at: its first query, of ``queries``; start: its first entry before clipping, of
            ``entries``.
    """
    summary_block: tl.constexpr = curve.summary_block
    at = queries_at // summary_block + tl.arange(0, queries // summary_block)
    extremes = curve.extremes + b * curve.extremes_row + tl.minimum(at, curve.summary_blocks - 1)
    first = clip(start, 0, count - 1)
    last = clip(start + (entries - 1), 0, count - 1)
    least = tl.load(curve.numbers + clip(curve.zero, first, last)) * tl.min(tl.load(extremes), 0)
    most = tl.maximum(tl.load(curve.numbers + first), tl.load(curve.numbers + last))
    most *= tl.max(tl.load(extremes + curve.summary_blocks), 0)
    knots = tl.load(curve.knots + tl.arange(0, curve.block))
    # Both counts in one sum, of 16 bits each: one reduction across threads.
    knots_below = (knots <= least).to(tl.int32) + ((knots <= most).to(tl.int32) << 16)
    knots_below = tl.sum(knots_below, 0)
    return knots_below & 0xFFFF, knots_below >> 16


@triton.jit
def _by_query(rate, for_keys: tl.constexpr):
    return rate[None, :] if for_keys else rate[:, None]


@triton.jit
def with_curve(
    logits,
    curve,
    rate,
    b,
    h,
    unit,
    queries_at,
    start,
    count,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    for_keys: tl.constexpr,
):
    """Logits ``[x, y]`` of a tile with the function, times ``unit``, added.

    The function of the lowest piece is added, then what it changes by at each knot up to the
    highest piece, ``max(u - knot, 0) * rise``. The loop carries logits: all is in their layout.

    Args:
        rate: of the tile's queries, ``[x]``, or ``[y]`` if ``for_keys``.
        queries_at: the first query of the tile.
        start: the first entry that the tile meets, before clipping.
    """
    numbers = window_of_biases(curve.numbers, 1.0, start, count, block_x, block_y, for_keys, False)
    queries: tl.constexpr = block_y if for_keys else block_x
    low, high = _pieces_between(curve, b, queries_at, start, count, queries, block_x + block_y - 1)
    slope = curve.slope + h * curve.pieces
    intercept = tl.load(curve.intercept + h * curve.pieces + low) * unit
    logits += numbers * _by_query(rate * (tl.load(slope + low) * unit), for_keys) + intercept
    if high > low:
        arguments = numbers * _by_query(rate, for_keys)
        for knot in range(low, high):
            rise = (tl.load(slope + knot + 1) - tl.load(slope + knot)) * unit
            logits += tl.maximum(arguments - tl.load(curve.knots + knot), 0.0) * rise
    return logits


@triton.jit
def rate_gradients(
    ds, rate, curve, b, h, queries_at, start, count, block_x: tl.constexpr, block_y: tl.constexpr
):
    """Gradients ``[x]`` of the rates of queries, from those of the logits ``[x, y]`` of a tile."""
    numbers = window_of_biases(curve.numbers, 1.0, start, count, block_x, block_y, False, False)
    low, high = _pieces_between(curve, b, queries_at, start, count, block_x, block_x + block_y - 1)
    slope = curve.slope + h * curve.pieces
    moments = ds * numbers
    rates_sum = tl.sum(moments, 1) * tl.load(slope + low)
    if high > low:
        arguments = numbers * rate[:, None]
        for knot in range(low, high):
            beyond = arguments >= tl.load(curve.knots + knot)
            rise = tl.load(slope + knot + 1) - tl.load(slope + knot)
            rates_sum += tl.sum(tl.where(beyond, moments, 0.0), 1) * rise
    return rates_sum


@triton.jit
def _total(tile):
    return tl.sum(tile)


@triton.jit
def piece_gradients(
    of_numbers,
    of_slope,
    of_intercept,
    ds,
    rate,
    curve,
    b,
    h,
    queries_at,
    start,
    count,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Sums of gradients with those of a tile added.

    Args:
        of_numbers: by pair, ``[x, y]``; of_slope, of_intercept: by piece, ``[2 * curve.block]``.
        ds: gradients of the tile's logits.
    """
    numbers = window_of_biases(curve.numbers, 1.0, start, count, block_x, block_y, False, False)
    low, high = _pieces_between(curve, b, queries_at, start, count, block_x, block_x + block_y - 1)
    slope = curve.slope + h * curve.pieces
    piece = tl.arange(0, 2 * curve.block)
    by_rate = ds * rate[:, None]
    of_numbers += by_rate * tl.load(slope + low)
    of_slope += tl.where(piece == low, _total(by_rate * numbers), 0.0)
    of_intercept += tl.where(piece == low, _total(ds), 0.0)
    if high > low:
        arguments = numbers * rate[:, None]
        for knot in range(low, high):
            beyond = arguments >= tl.load(curve.knots + knot)
            rise = tl.load(slope + knot + 1) - tl.load(slope + knot)
            of_numbers += tl.where(beyond, by_rate * rise, 0.0)
            # From the piece before the knot to the one behind it.
            moved = tl.where(piece == knot + 1, 1.0, 0.0) - tl.where(piece == knot, 1.0, 0.0)
            of_slope += moved * _total(tl.where(beyond, by_rate * numbers, 0.0))
            of_intercept += moved * _total(tl.where(beyond, ds, 0.0))
    return of_numbers, of_slope, of_intercept
