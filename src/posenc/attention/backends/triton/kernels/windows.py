"""Terms that depend on the offset: products with all entries that a tile reads, and back.

A square tile meets ``2 * block - 1`` entries, its window. The products of tokens with all entries
of the window, a row (or column) of products for each token, are unrolled into the tile by a
gather, and a tile is rolled up into them for the gradients.

A ``Curve``, a piecewise-linear function of the distance, has as its argument a number by offset
times a rate of the query. The pairs of a tile have arguments in a range, which mostly lies within
one piece: numbers grow ever slower with the distance. Only knots inside the range are compared with
the arguments, one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from posenc.attention.backends.triton.kernels.memory import (
    INTERPRETED,
    by_query,
    clip,
    load_entries,
    product,
)

PAIRED = INTERPRETED
"""True to read biases two by two on any device."""


@triton.jit
def window_start(args, x0, y0, queries: tl.constexpr):
    """The first entry that a tile with so many queries meets, before clipping."""
    t = y0 - x0 + args.band.origin
    return -(t + queries - 1) if args.for_keys else t - (queries - 1)


@triton.jit
def _unrolled(values, index, block_x: tl.constexpr, block_y: tl.constexpr):
    """The tile ``[x, y]`` of the values ``[N]`` at its places."""
    flat = tl.reshape(index, [block_x * block_y])
    return tl.reshape(tl.gather(values, flat, 0), [block_x, block_y])


@triton.jit
def window_of_biases(
    args, biases, factor, start, block_x: tl.constexpr, block_y: tl.constexpr, twice: tl.constexpr
):
    """The tile ``[x, y]`` of what each pair reads of biases, times a factor."""
    count = args.tables.count
    if PAIRED or (cuda_capability_geq(9, 0) and not cuda_capability_geq(12, 0)):
        tile = paired_biases(biases, factor, start, count, block_x, block_y, args.for_keys, twice)
    else:
        tile = single_biases(biases, factor, start, count, block_x, block_y, args.for_keys)
    return tile


@triton.jit
def single_biases(
    biases, factor, start, count, block_x: tl.constexpr, block_y: tl.constexpr,
    for_keys: tl.constexpr,
):
    """``window_of_biases``, read one by one."""
    size: tl.constexpr = triton.next_power_of_2(block_x + block_y)
    entry = clip(start + tl.arange(0, size), 0, count - 1)
    window = tl.load(biases + entry) * factor
    x = tl.arange(0, block_x)[:, None]
    y = tl.arange(0, block_y)[None, :]
    index = x - y + (block_y - 1) if for_keys else y - x + (block_x - 1)
    return _unrolled(window, index, block_x, block_y)


@triton.jit
def paired_biases(
    biases, factor, start, count, block_x: tl.constexpr, block_y: tl.constexpr,
    for_keys: tl.constexpr, twice: tl.constexpr,
):
    """``window_of_biases``, those of two neighbours read at once as a number of 64 bits.

    Registers of compute capability 9 and 10 hold neighbours together; elsewhere they would have to
    be moved. So would those that products are added to, as a thread holds numbers of x and x + 8:
    read ``twice``, from two windows, they need not be copied.
    """
    size: tl.constexpr = triton.next_power_of_2(block_x + block_y)
    at = start + tl.arange(0, size)
    even = tl.load(biases + clip(at, 0, count - 1)) * factor
    odd = tl.load(biases + clip(at - 1 if for_keys else at + 1, 0, count - 1)) * factor
    low = even.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = odd.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = tl.arange(0, block_x)[:, None]
    y = 2 * tl.arange(0, block_y // 2)[None, :]
    index = x - y + (block_y - 1) if for_keys else y - x + (block_x - 1)
    window = low | (high << 32)
    if twice:
        window = tl.reshape(tl.permute(tl.join(window, window), (1, 0)), [2 * size])
        index += x // 8 % 2 * size
    both = _unrolled(window, index, block_x, block_y // 2)
    first = both.to(tl.uint32).to(tl.float32, bitcast=True)
    second = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(first, second), [block_x, block_y])


@triton.jit
def unroll_x(first, second, for_keys: tl.constexpr):
    """A tile ``[x, y]`` from products of x with both halves of the window, ``[x, half]`` each.

    Pair (x, y) meets entry ``y - x + block - 1`` of the window (``x - y + block - 1``, flipped).
    """
    block: tl.constexpr = first.shape[0]
    window = tl.permute(tl.join(first, second), (0, 2, 1))  # [x, 2, half]
    x = tl.arange(0, block)[:, None]
    y = tl.arange(0, block)[None, :]
    entry = (x - y if for_keys else y - x) + (block - 1)
    flat = tl.reshape(window, [2 * block * block])
    return _unrolled(flat, x * (2 * block) + entry, block, block)


@triton.jit
def unroll_y(window, for_keys: tl.constexpr):
    """A tile ``[x, y]`` from products of y with the window, ``[entry, y]``."""
    block: tl.constexpr = window.shape[1]
    x = tl.arange(0, block)[:, None]
    y = tl.arange(0, block)[None, :]
    entry = (x - y if for_keys else y - x) + (block - 1)
    flat = tl.reshape(window, [2 * block * block])
    return _unrolled(flat, entry * block + y, block, block)


@triton.jit
def roll_x(tile, for_keys: tl.constexpr):
    """Inverse of ``unroll_x``: the window ``[x, entry]``, zero where nothing is read.

    Rows are padded with as many zeros, such that an entry beyond a row meets zeros of its own row
    or of the next; the one row without a next has a half of zeros only.
    """
    block: tl.constexpr = tile.shape[0]
    zeros = tl.zeros_like(tile)
    x = tl.arange(0, block)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    entry = tl.arange(0, block)[None, None, :]
    last = (half == 1) & (x == (0 if for_keys else block - 1))
    if for_keys:
        rows = tl.join(tile, zeros)
        index = x * (2 * block + 1) + block - 1 - half * block
        index = tl.where(last, 2 * block - 1, index) - entry
    else:
        rows = tl.join(zeros, tile)
        index = x * (2 * block + 1) + 1 + half * block
        index = tl.where(last, 0, index) + entry
    flat = tl.reshape(tl.permute(rows, (0, 2, 1)), [2 * block * block])
    return _unrolled(flat, index, block, 2 * block)


@triton.jit
def roll_y(tile, for_keys: tl.constexpr):
    """Inverse of ``unroll_y``: the window ``[entry, y]``, zero where nothing is read.

    With x and y exchanged, entries run the other way.
    """
    return tl.trans(roll_x(tl.trans(tile), not for_keys))


@triton.jit
def half_of_x(args, tokens, table, h, start):
    """Products ``[x, half]`` of tokens of x with the half of a window that begins at ``start``."""
    rows = load_entries(table, h, start, args.tables.count, tokens.shape[0])
    return product(tokens, tl.trans(rows), args.precision)


@triton.jit
def window_of_x(args, tokens, table, h, start):
    """The tile ``[x, y]`` of products of tokens of x with what each pair reads of a table."""
    first = half_of_x(args, tokens, table, h, start)
    second = half_of_x(args, tokens, table, h, start + tokens.shape[0])
    return unroll_x(first, second, args.for_keys)


@triton.jit
def window_of_y(args, tokens, table, h, start):
    """The tile ``[x, y]`` of products of tokens of y with what each pair reads of a table."""
    rows = load_entries(table, h, start, args.tables.count, 2 * tokens.shape[0])
    return unroll_y(product(rows, tl.trans(tokens), args.precision), args.for_keys)


@triton.jit
def rows_of_x(args, tile, table, h, start):
    """Sums ``[x, width]`` over y of a tile's numbers times what each pair reads of a table."""
    rows = load_entries(table, h, start, args.tables.count, 2 * tile.shape[0])
    return product(roll_x(tile.to(rows.dtype), args.for_keys), rows, args.precision)


@triton.jit
def rates_of(curve, b, at, length):
    """Rates ``[N]`` of the queries ``at``; those beyond their length are like the last."""
    return tl.load(curve.rates + b * curve.rates_row + tl.minimum(at, length - 1))


@triton.jit
def _curve_pieces(args, b, queries_at, start, block_x: tl.constexpr, block_y: tl.constexpr):
    """Numbers ``[x, y]`` of a tile, and the pieces of its least and of its largest argument.

    Args:
        queries_at: its first query; start: its first entry before clipping.
    """
    numbers = window_of_biases(args, args.tables.curve.numbers, 1.0, start, block_x, block_y, False)
    queries: tl.constexpr = block_y if args.for_keys else block_x
    summary_block: tl.constexpr = args.summary_block
    at = queries_at // summary_block + tl.arange(0, queries // summary_block)
    extremes = args.tables.curve.extremes + b * args.tables.curve.extremes_row
    extremes += tl.minimum(at, args.tables.curve.summary_blocks - 1)
    first = clip(start, 0, args.tables.count - 1)
    last = clip(start + (block_x + block_y - 2), 0, args.tables.count - 1)
    least = tl.load(args.tables.curve.numbers + clip(args.tables.curve.zero, first, last))
    least *= tl.min(tl.load(extremes), 0)
    most = tl.load(args.tables.curve.numbers + first)
    most = tl.maximum(most, tl.load(args.tables.curve.numbers + last))
    most *= tl.max(tl.load(extremes + args.tables.curve.summary_blocks), 0)
    knots = tl.load(args.tables.curve.knots + tl.arange(0, args.tables.curve.block))
    # Both counts in one sum, of 16 bits each: one reduction across threads.
    knots_below = (knots <= least).to(tl.int32) + ((knots <= most).to(tl.int32) << 16)
    knots_below = tl.sum(knots_below, 0)
    return numbers, knots_below & 0xFFFF, knots_below >> 16


@triton.jit
def _rise(slope, knot):
    """How much steeper the function is behind a knot than before it."""
    return tl.load(slope + knot + 1) - tl.load(slope + knot)


@triton.jit
def with_curve(args, logits, tile, other, unit, start):
    """Logits ``[x, y]`` of a tile with the function, times ``unit``, added.

    The function of the lowest piece is added, then what it changes by at each knot up to the
    highest piece, ``max(u - knot, 0) * rise``. The loop carries logits: all is in their layout.
    """
    if args.for_keys:
        rate = rates_of(args.tables.curve, tile.b, other.at, args.y.length)
        queries_at = other.start
    else:
        rate = tile.rate
        queries_at = tile.start
    numbers, low, high = _curve_pieces(
        args, tile.b, queries_at, start, logits.shape[0], logits.shape[1]
    )
    slope = args.tables.curve.slope + tile.h * args.tables.curve.pieces
    intercept = args.tables.curve.intercept + tile.h * args.tables.curve.pieces
    intercept = tl.load(intercept + low) * unit
    steepness = by_query(rate * (tl.load(slope + low) * unit), args.for_keys)
    logits += numbers * steepness + intercept
    if high > low:
        arguments = numbers * by_query(rate, args.for_keys)
        for knot in range(low, high):
            beyond = tl.maximum(arguments - tl.load(args.tables.curve.knots + knot), 0.0)
            logits += beyond * (_rise(slope, knot) * unit)
    return logits


@triton.jit
def rate_gradients(args, tile, ds, start):
    """Gradients ``[x]`` of the rates of queries, from those of the logits ``[x, y]`` of a tile."""
    numbers, low, high = _curve_pieces(
        args, tile.b, tile.start, start, ds.shape[0], ds.shape[1]
    )
    slope = args.tables.curve.slope + tile.h * args.tables.curve.pieces
    moments = ds * numbers
    rates_sum = tl.sum(moments, 1) * tl.load(slope + low)
    if high > low:
        arguments = numbers * tile.rate[:, None]
        for knot in range(low, high):
            beyond = arguments >= tl.load(args.tables.curve.knots + knot)
            rates_sum += tl.sum(tl.where(beyond, moments, 0.0), 1) * _rise(slope, knot)
    return rates_sum


@triton.jit
def _total(tile):
    return tl.sum(tile)


@triton.jit
def piece_gradients(args, tile, ds, start, of_numbers, of_slope, of_intercept):
    """Sums of gradients with those of a tile added.

    Args:
        ds: gradients of the tile's logits.
        of_numbers: by pair, ``[x, y]``; of_slope, of_intercept: by piece, ``[2 * curve.block]``.
    """
    numbers, low, high = _curve_pieces(
        args, tile.b, tile.start, start, ds.shape[0], ds.shape[1]
    )
    slope = args.tables.curve.slope + tile.h * args.tables.curve.pieces
    piece = tl.arange(0, 2 * args.tables.curve.block)
    by_rate = ds * tile.rate[:, None]
    of_numbers += by_rate * tl.load(slope + low)
    of_slope += tl.where(piece == low, _total(by_rate * numbers), 0.0)
    of_intercept += tl.where(piece == low, _total(ds), 0.0)
    if high > low:
        arguments = numbers * tile.rate[:, None]
        for knot in range(low, high):
            beyond = arguments >= tl.load(args.tables.curve.knots + knot)
            of_numbers += tl.where(beyond, by_rate * _rise(slope, knot), 0.0)
            # From the piece before the knot to the one behind it.
            moved = tl.where(piece == knot + 1, 1.0, 0.0) - tl.where(piece == knot, 1.0, 0.0)
            of_slope += moved * _total(tl.where(beyond, by_rate * numbers, 0.0))
            of_intercept += moved * _total(tl.where(beyond, ds, 0.0))
    return of_numbers, of_slope, of_intercept
