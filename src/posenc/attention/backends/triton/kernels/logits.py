"""Logits and their gradients ``ds`` of one tile, and the walk over all tiles of y.

Pairs read entry ``n = clip(t, 0, count - 1)`` of everything that depends on the offset, with t as
in ``Band``; entry ``clip(-t, …)`` where ``for_keys``. A tile wholly at or beyond the first or last
entry reads just that one, and one number a token is all that is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import OtherTile, Tile
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    by_query,
    clip,
    load_numbers,
    load_side,
    load_tokens,
    product,
)
from posenc.attention.backends.triton.kernels.visibility import undropped, visible
from posenc.attention.backends.triton.kernels.windows import (
    half_of_x,
    rates_of,
    unroll_x,
    window_of_biases,
    window_of_x,
    window_of_y,
    window_start,
    with_curve,
)

# Kinds of tiles: pairs read several entries; the first alone; the last alone.
NEAR = tl.constexpr(0)
LOW = tl.constexpr(1)
HIGH = tl.constexpr(2)


@triton.jit
def load_tile(args, tokens, partners, second, b, h, start, block: tl.constexpr):
    """The tile of x from token ``start`` on: tokens of its head, and what query head h has more."""
    at = start + tl.arange(0, block)
    rated: tl.constexpr = args.tables.curve is not None and not args.for_keys
    return Tile(
        start=start,
        at=at,
        b=b,
        h=h,
        lane=(b * args.heads + h).to(tl.int32),
        seed=tl.load(args.dropout.seed) if args.dropout is not None else 0,
        tokens=tokens,
        partners=partners,
        second=second,
        term=_tokens(args.x.term, b, h, at, args.x.length),
        factor=_tokens(args.x.factor, b, h, at, args.x.length),
        column=_numbers(args.x.column, b, h, at, args.x.length, 0.0),
        rate=rates_of(args.tables.curve, b, at, args.x.length) if rated else 0.0,
        lse=_numbers(args.x.lse, b, h, at, args.x.length, float("-inf")),
        delta=_numbers(args.x.delta, b, h, at, args.x.length, 0.0),
    )


@triton.jit
def query_tile(args, block: tl.constexpr):
    """The tile of queries that a program computes; x are the queries.

    Later queries see more where keys are hidden ahead: they go first.
    """
    blocks = tl.cdiv(args.x.length, block)
    start = (blocks - 1 - tl.program_id(0) % blocks) * block
    lane = tl.program_id(0) // blocks
    b = (lane // args.heads).to(tl.int64)
    h = lane % args.heads
    at = start + tl.arange(0, block)
    tokens, partners = load_side(args.x, b, h, at)
    second = _tokens(args.x.second, b, h, at, args.x.length)
    return load_tile(args, tokens, partners, second, b, h, start, block)


@triton.jit
def _tokens(tokens, b, h, at, length):
    return load_tokens(tokens, b, h, at, length) if tokens is not None else 0.0


@triton.jit
def _numbers(numbers, b, h, at, length, other):
    return load_numbers(numbers, b, h, at, length, other) if numbers is not None else 0.0


@triton.jit
def load_other(args, tile, head, number, block: tl.constexpr):
    """Tile ``number`` of y, of a head of its tokens, without their ``second``."""
    at = number * block + tl.arange(0, block)
    tokens, partners = load_side(args.y, tile.b, head, at)
    factor = _tokens(args.y.factor, tile.b, tile.h, at, args.y.length)
    return OtherTile(number, number * block, at, head, tokens, partners, factor)


class FarNumbers(NamedTuple):
    """Numbers ``[x]`` of tokens of x where a tile reads one entry: ``bias`` of the logits, and
    ``second``, of queries, of the gradients of weights; a dummy where there is no such thing."""

    bias: Any
    second: Any


@triton.jit
def _far_numbers(args, tile, kind: tl.constexpr):
    bias = tl.zeros([tile.at.shape[0]], tl.float32)
    second = tl.zeros([1], tl.float32)
    if kind != NEAR:
        term = args.x.term_low if kind == LOW else args.x.term_high
        if term is not None:
            bias += load_numbers(term, tile.b, tile.h, tile.at, args.x.length, 0.0)
        if args.tables.bias_by_offset is not None:
            last: tl.constexpr = (kind == HIGH) != args.for_keys
            biases = args.tables.bias_by_offset + tile.h.to(tl.int64) * args.tables.bias_head
            bias += tl.load(biases + (args.tables.count - 1 if last else 0))
        values = args.x.second_low if kind == LOW else args.x.second_high
        if values is not None:
            second = load_numbers(values, tile.b, tile.h, tile.at, args.x.length, 0.0)
    return FarNumbers(bias, second)


@triton.jit
def carried_before(args, tile, y0, unscaled: tl.constexpr):
    """``carried`` of ``tile_logits`` for a tile at ``y0`` that has none before it: ``[x, half]``.

    Gradients with two tables have no registers to carry it in: products are computed twice.
    """
    carried = tl.zeros([1, 1], tl.float32)
    if args.tables.x_rows is not None and not (unscaled and args.tables.y_rows is not None):
        block: tl.constexpr = tile.at.shape[0]
        start = window_start(args, tile.start, y0, block)
        if args.for_keys:
            start += block
        carried = half_of_x(args, tile.term, args.tables.x_rows, tile.h, start)
    return carried


@triton.jit
def _product(args, tile, other, start=None):
    """Products ``[x, y]`` of queries and keys, added to ``start``."""
    products = product(tile.tokens, tl.trans(other.tokens), args.precision, start)
    if args.x.rotary is not None:
        products = product(tile.partners, tl.trans(other.partners), args.precision, products)
    return products


@triton.jit
def capped(logits, cap):
    """``cap · tanh(logits / cap)``, by a polynomial near 0, where 1 - e^-2x would cancel."""
    x = logits / cap
    small = tl.minimum(tl.maximum(x, -1.0), 1.0)  # x may be infinite
    square = small * small
    near = -5.70498872745e-3 * square + 2.06390887954e-2  # Cephes' minimax of (tanh x - x) / x³
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    power = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - power) / (1 + power)
    far = tl.where(x < 0, -far, far)
    return cap * tl.where(tl.abs(x) < 0.625, small + small * square * near, far)


@triton.jit
def softmax_step(logits, row_max, row_sum):
    """Weights of a tile, the factor of what was summed before, and the new maxima and sums."""
    new_max = tl.maximum(row_max, tl.max(logits, 1))  # [x]
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    weights = tl.exp2(logits - finite_max[:, None])  # [x, y]
    rescale = tl.exp2(row_max - finite_max)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def _added(logits, term):
    return term if logits is None else logits + term


@triton.jit
def tile_logits(
    args, tile, other, far, carried, kind: tl.constexpr, masked: tl.constexpr,
    unscaled: tl.constexpr,
):
    """Logits ``[x, y]`` of one tile, -inf where hidden, without what each token of x adds.

    That is ``far.bias`` and its column, but under a cap, which takes whole logits. They are to
    the base of 2, or divided by the scale if ``unscaled``: the sums of products then start with all
    else, one addition less a pair. The forward pass, which needs their maximum, would gain less by
    it than it has to move.

    Args:
        far: ``FarNumbers`` where the tile reads one entry.
        carried: products of x with the half of the window that it shares with the tile before.

    Returns those with the half that it shares with the next tile, too.
    """
    block_x: tl.constexpr = tile.at.shape[0]
    block_y: tl.constexpr = other.at.shape[0]
    start = window_start(args, tile.start, other.start, block_y if args.for_keys else block_x)
    logits = None  # [x, y]
    unit = LOG2E
    if unscaled:
        unit = 1 / args.scale
    else:
        logits = _product(args, tile, other)
        logits *= args.scale * LOG2E
    if args.x.factor is not None:
        products = product(tile.factor, tl.trans(other.factor), args.factor_precision)
        logits = _added(logits, products * unit)
    if kind == NEAR:
        if args.tables.bias_by_offset is not None:
            biases = args.tables.bias_by_offset + tile.h.to(tl.int64) * args.tables.bias_head
            # Keys' gradients have as many copies either way, and no registers left.
            twice: tl.constexpr = unscaled and not args.for_keys
            biases = window_of_biases(args, biases, unit, start, block_x, block_y, twice)
            logits = _added(logits, biases)
        if args.tables.x_rows is not None:
            tl.static_assert(block_x == block_y)
            if unscaled and args.tables.y_rows is not None:
                products = window_of_x(args, tile.term, args.tables.x_rows, tile.h, start)
            else:
                half = start if args.for_keys else start + block_x
                fresh = half_of_x(args, tile.term, args.tables.x_rows, tile.h, half)
                if args.for_keys:
                    products = unroll_x(fresh, carried, args.for_keys)
                else:
                    products = unroll_x(carried, fresh, args.for_keys)
                carried = fresh  # the windows of neighbouring tiles overlap by half
            logits = _added(logits, products * unit)
        if args.tables.y_rows is not None:
            tl.static_assert(block_x == block_y)
            y_term = load_tokens(args.y.term, tile.b, tile.h, other.at, args.y.length)
            products = window_of_y(args, y_term, args.tables.y_rows, tile.h, start)
            logits = _added(logits, products * unit)
    elif args.tables.y_rows is not None:
        numbers = args.y.term_low if kind == LOW else args.y.term_high
        numbers = load_numbers(numbers, tile.b, tile.h, other.at, args.y.length, 0.0)
        logits = _added(logits, tl.broadcast_to((numbers * unit)[None, :], [block_x, block_y]))
    if args.y.column is not None:
        column = load_numbers(args.y.column, tile.b, tile.h, other.at, args.y.length, 0.0)
        logits = _added(logits, tl.broadcast_to((column * unit)[None, :], [block_x, block_y]))
    if unscaled:
        logits = _product(args, tile, other, logits)
    if args.tables.curve is not None:
        logits = with_curve(args, logits, tile, other, unit, start)
    if args.tables.softcap is not None:
        if kind != NEAR:
            logits += (far.bias * unit)[:, None]
        if args.x.column is not None:
            logits += (tile.column * unit)[:, None]
        logits = capped(logits, args.tables.softcap * unit)
    if masked:
        logits = tl.where(visible(args, tile.b, tile.at, other.at), logits, float("-inf"))
    return logits, carried


@triton.jit
def weight_shift(lse):
    """The difference between logits to the base of 2 and the logarithms of weights; +inf for an
    lse of -inf, of rows without visible keys, makes their weights 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def tile_ds(
    args, tile, other, y_second, far, carried, kind: tl.constexpr, masked: tl.constexpr
):
    """Weights ``p = exp(s - lse)`` after dropout and ``ds = p (dp - delta)`` of a tile ``[x, y]``.

    Args:
        y_second: of the tile; far, carried: as of ``tile_logits``, and returned likewise.
    """
    logits, carried = tile_logits(args, tile, other, far, carried, kind, masked, True)
    if args.for_keys:
        lse = load_numbers(args.y.lse, tile.b, tile.h, other.at, args.y.length, float("-inf"))
        delta = load_numbers(args.y.delta, tile.b, tile.h, other.at, args.y.length, 0.0)
    else:
        lse, delta = tile.lse, tile.delta
    shift = by_query(weight_shift(lse), args.for_keys)
    delta = by_query(delta, args.for_keys)
    # What is added to all logits of a row is taken off its lse, a number a row instead of a tile.
    if args.tables.softcap is None:
        if kind != NEAR:
            shift = shift - (far.bias * LOG2E)[:, None]
        if args.x.column is not None:
            shift = shift - (tile.column * LOG2E)[:, None]
    weights = tl.exp2(logits * (args.scale * LOG2E) - shift)  # [x, y]
    if args.tables.value_rows is not None and kind == NEAR:
        start = window_start(args, tile.start, other.start, tile.at.shape[0])
        if args.for_keys:
            dp = window_of_y(args, y_second, args.tables.value_rows, tile.h, start)
        else:
            dp = window_of_x(args, tile.second, args.tables.value_rows, tile.h, start)
        dp = product(tile.second, tl.trans(y_second), args.precision, dp)  # [x, y]
    else:
        dp = product(tile.second, tl.trans(y_second), args.precision)
        if args.tables.value_rows is not None:
            if args.for_keys:
                numbers = args.y.second_low if kind == LOW else args.y.second_high
                numbers = load_numbers(numbers, tile.b, tile.h, other.at, args.y.length, 0.0)
                dp += numbers[None, :]
            else:
                dp += far.second[:, None]
    dropped = weights
    if args.dropout is not None:
        keep = undropped(args, tile, other.start, other.at.shape[0])
        dp = tl.where(keep, dp * args.dropout.factor, 0.0)
        dropped = tl.where(keep, weights * args.dropout.factor, 0.0)
    ds = weights * (dp - delta)
    if args.tables.softcap is not None:
        tangent = tl.maximum(logits * (args.scale / args.tables.softcap), -1.0)  # -inf where hidden
        ds *= 1 - tangent * tangent
    return dropped, ds, carried


@triton.jit
def _walk_kind(
    step: tl.constexpr, args, state, tile, y_head, begin, end, ranges, kind: tl.constexpr,
    masked: tl.constexpr, unscaled: tl.constexpr, block: tl.constexpr,
):
    """Tiles ``begin`` to ``end``, all of one kind: NEAR ones compute terms by pair, LOW and HIGH
    ones read one entry."""
    far = _far_numbers(args, tile, kind)
    carried = tl.zeros([1, 1], tl.float32)
    if kind == NEAR:
        carried = carried_before(args, tile, begin * block, unscaled)
    for number in range(begin, end):
        other = load_other(args, tile, y_head, number, block)
        state, carried = step(args, state, tile, other, far, carried, ranges, kind, masked)
    return state


@triton.jit
def walk(
    step: tl.constexpr, args, state, tile, y_head, ranges, unscaled: tl.constexpr,
    block: tl.constexpr,
):
    """The state after all tiles of y, changed by ``step`` at each.

    Args:
        step: a function of ``args``, the state, the tiles of x and y, ``FarNumbers``, what
            ``tile_logits`` carries, the ranges, the kind of the tile and whether it is masked. It
            returns the state and what is carried.
        ranges: ``TileRanges``; unscaled: as of ``tile_logits``; block: tokens of a tile of y.
    """
    near = clip(ranges.low_end, ranges.clear, ranges.edge)
    far = clip(ranges.high_begin, near, ranges.edge)
    if args.edged:
        state = _walk_kind(
            step, args, state, tile, y_head, ranges.begin, ranges.clear, ranges, NEAR, True,
            unscaled, block,
        )
    if args.has_low:
        state = _walk_kind(
            step, args, state, tile, y_head, ranges.clear, near, ranges, LOW, False, unscaled,
            block,
        )
    state = _walk_kind(
        step, args, state, tile, y_head, near, far, ranges, NEAR, False, unscaled, block
    )
    if args.has_high:
        state = _walk_kind(
            step, args, state, tile, y_head, far, ranges.edge, ranges, HIGH, False, unscaled, block
        )
    return _walk_kind(
        step, args, state, tile, y_head, ranges.edge, ranges.end, ranges, NEAR, True, unscaled,
        block,
    )
