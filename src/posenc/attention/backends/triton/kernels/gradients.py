"""All gradients: of queries, keys and their terms, of tables by offset, and the products before.

``gradients_kernel`` computes dQ and the gradients of the query-side terms, or dK, dV and those of
the key side if ``for_keys``. Among the latter is DeBERTa's p2c: ``into.term`` of keys, a sum over
tiles of ``rows_of_x``. The gradients of its rows, by offset, are those of ``offsets_kernel``, for
which each program takes a diagonal of square tiles. They all meet the same window of entries, so
that it sums over batch rows and tiles in its registers, and no two programs write to the same
memory. Neighbouring windows overlap; they are added afterwards. Squares of pairs that read one
entry alone are left out where ``gradients_kernel`` has summed them up already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.configs import OFFSETS, TOKENS, all_or_first, fitting
from posenc.attention.backends.triton.kernels.logits import (
    HIGH,
    LOW,
    NEAR,
    carried_before,
    load_other,
    load_tile,
    tile_ds,
    walk,
)
from posenc.attention.backends.triton.kernels.memory import (
    load_row,
    load_side,
    load_tokens,
    product,
    store_gradients,
    store_numbers,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.visibility import (
    has_visible_pairs,
    visible_tile_ranges,
)
from posenc.attention.backends.triton.kernels.windows import (
    piece_gradients,
    rate_gradients,
    roll_x,
    roll_y,
    rows_of_x,
    window_start,
)


class _GradientSums(NamedTuple):
    """Sums of a block of x so far, as in ``Gradients``; a dummy where there is no such thing.

    Of tokens that are rotated, ``tokens`` are first members of pairs and ``partners`` second ones.
    """

    tokens: Any
    partners: Any
    second: Any
    term: Any
    factor: Any
    column: Any
    low: Any
    high: Any
    weight_low: Any
    weight_high: Any
    rate: Any


@triton.jit
def _differentiate_tile(
    args, state, tile, other, far, carried, ranges, kind: tl.constexpr, masked: tl.constexpr
):
    """The sums with those of a tile of y.

    Of tiles with hidden pairs (``masked``), some may read one entry alone, too: those before
    ``ranges.low_end`` and from ``ranges.high_begin`` on.
    """
    token_sum, partner_sum, second_sum = state.tokens, state.partners, state.second
    term_sum, factor_sum = state.term, state.factor
    column, rate = state.column, state.rate
    low, high = state.low, state.high
    weight_low, weight_high = state.weight_low, state.weight_high
    second = load_tokens(args.y.second, tile.b, other.head, other.at, args.y.length)
    weights, ds, carried = tile_ds(args, tile, other, second, far, carried, kind, masked)
    token_sum += product(ds.to(other.tokens.dtype), other.tokens, args.precision)
    if args.x.rotary is not None:
        partner_sum += product(ds.to(other.tokens.dtype), other.partners, args.precision)
    if args.for_keys:
        second_sum += product(weights.to(second.dtype), second, args.precision)
    if args.x.factor is not None:
        factor_sum += product(ds, other.factor, args.factor_precision)
    if args.x.column is not None:
        column += tl.sum(ds, 1)
    start = window_start(args, tile.start, other.start, tile.at.shape[0])
    if args.tables.curve is not None and not args.for_keys:
        rate += rate_gradients(args, tile, ds, start)
    if kind == LOW:
        low += tl.sum(ds, 1)
        weight_low += tl.sum(weights, 1)
    elif kind == HIGH:
        high += tl.sum(ds, 1)
        weight_high += tl.sum(weights, 1)
    else:
        is_low = other.number < ranges.low_end
        is_high = other.number >= ranges.high_begin
        if masked and args.has_low:
            low += tl.where(is_low, tl.sum(ds, 1), 0.0)
            weight_low += tl.where(is_low, tl.sum(weights, 1), 0.0)
        if masked and args.has_high:
            high += tl.where(is_high, tl.sum(ds, 1), 0.0)
            weight_high += tl.where(is_high, tl.sum(weights, 1), 0.0)
        if args.tables.x_rows is not None:
            if masked and args.has_low:
                ds = tl.where(is_low, 0.0, ds)
            if masked and args.has_high:
                ds = tl.where(is_high, 0.0, ds)
            term_sum += rows_of_x(args, ds, args.tables.x_rows, tile.h, start)
    return _GradientSums(
        token_sum, partner_sum, second_sum, term_sum, factor_sum, column, low, high, weight_low,
        weight_high, rate,
    ), carried


@triton.autotune(configs=TOKENS, key=["key"], prune_configs_by={"early_config_prune": fitting})
@triton.jit(do_not_specialize=["key"])
def gradients_kernel(args, into, key, block_x: tl.constexpr, block_y: tl.constexpr):
    """One block of x of one of its heads; keys meet all query heads that share them, one by one.

    Args:
        into: where the gradients go, ``Gradients``.
    """
    blocks = tl.cdiv(args.x.length, block_x)
    # Later queries see more, and earlier keys are seen more, where keys are hidden ahead.
    block = tl.program_id(0) % blocks
    if not args.for_keys:
        block = blocks - 1 - block
    x0 = block * block_x
    at = x0 + tl.arange(0, block_x)
    heads = args.heads
    members = 1
    if args.for_keys:
        heads = args.heads // args.group
        members = args.group
    lane = tl.program_id(0) // blocks
    b = (lane // heads).to(tl.int64)
    x_head = lane % heads
    tokens, partners = load_side(args.x, b, x_head, at)
    second = load_tokens(args.x.second, b, x_head, at, args.x.length)
    ranges = visible_tile_ranges(args, b, x0, block_x, block_y, args.span)
    zeros = tl.zeros([block_x], tl.float32)
    rotated: tl.constexpr = args.x.rotary is not None
    token_sum = _zeros(args.x.rotary if rotated else args.x.tokens, block_x)
    partner_sum = _zeros(args.x.rotary, block_x)
    second_sum = _zeros(args.x.second if args.for_keys else None, block_x)
    for member in range(members):
        h = x_head * members + member
        y_head = h
        if not args.for_keys:
            y_head = h // args.group
        tile = load_tile(args, tokens, partners, second, b, h, x0, block_x)
        sums = _GradientSums(
            token_sum, partner_sum, second_sum, _zeros(args.x.term, block_x),
            _zeros(args.x.factor, block_x), zeros, zeros, zeros, zeros, zeros, zeros,
        )
        sums = walk(_differentiate_tile, args, sums, tile, y_head, ranges, True, block_y)
        token_sum = sums.tokens
        partner_sum = sums.partners
        second_sum = sums.second
        if args.x.term is not None:
            result = sums.term
            if args.has_low:
                row = load_row(args.tables.x_rows, h, args.tables.count - 1 if args.for_keys else 0)
                result += sums.low[:, None] * row[None, :]
            if args.has_high:
                row = load_row(args.tables.x_rows, h, 0 if args.for_keys else args.tables.count - 1)
                result += sums.high[:, None] * row[None, :]
            store_tokens(into.term, b, h, result, at, args.x.length)
        if args.x.factor is not None:
            store_tokens(into.factor, b, h, sums.factor, at, args.x.length)
        _store(into.column, b, h, sums.column, at, args.x.length)
        _store(into.low, b, h, sums.low, at, args.x.length)
        _store(into.high, b, h, sums.high, at, args.x.length)
        _store(into.rate, b, h, sums.rate, at, args.x.length)
        _store(into.weight_low, b, h, sums.weight_low, at, args.x.length)
        _store(into.weight_high, b, h, sums.weight_high, at, args.x.length)
    store_gradients(
        into.tokens, args.x.rotary, token_sum * args.scale, partner_sum * args.scale, b, x_head, at,
        args.x.length,
    )
    if args.for_keys:
        store_tokens(into.second, b, x_head, second_sum, at, args.x.length)


@triton.jit
def _zeros(tokens, block: tl.constexpr):
    """Sums of vectors like those of tokens; a dummy for none."""
    return tl.zeros([block, tokens.block], tl.float32) if tokens is not None else 0.0


@triton.jit
def _store(into, b, h, value, at, length):
    if into is not None:
        store_numbers(into, b, h, value, at, length)


@triton.autotune(
    configs=OFFSETS, key=["key"], prune_configs_by={"early_config_prune": all_or_first}
)
@triton.jit(do_not_specialize=["key"])
def offsets_kernel(args, into, key, block: tl.constexpr):
    """Sums over a share of the tiles of one diagonal, of one head or of all.

    Args:
        into: where they go, ``DiagonalSums``.
    """
    diagonal_index = tl.program_id(0) % into.diagonals
    head = tl.program_id(0) // into.diagonals % into.heads
    split = tl.program_id(0) // (into.diagonals * into.heads)
    diagonal = into.first + diagonal_index
    x_tiles = tl.cdiv(args.x.length, block)
    y_tiles = tl.cdiv(args.y.length, block)
    begin = tl.maximum(-diagonal, 0)
    tiles = tl.maximum(tl.minimum(x_tiles, y_tiles - diagonal) - begin, 0)
    heads_summed = args.heads // into.heads
    items = args.batch * heads_summed * tiles
    items_per_split = tl.cdiv(items, into.splits)
    tiles_per_span: tl.constexpr = args.span // block
    bias_sum = tl.zeros([1, 1], tl.float32)
    if into.entries is not None:
        bias_sum = tl.zeros([block, block], tl.float32)
    slope_sum = tl.zeros([1], tl.float32)
    intercept_sum = tl.zeros([1], tl.float32)
    if into.slope is not None:
        slope_sum = tl.zeros([2 * args.tables.curve.block], tl.float32)
        intercept_sum = tl.zeros([2 * args.tables.curve.block], tl.float32)
    rows_sum = tl.zeros([1, 1], tl.float32)
    if into.rows is not None:
        row_block: tl.constexpr = args.y.second.block if into.of_values else args.y.term.block
        rows_sum = tl.zeros([2 * block, row_block], tl.float32)
    for item in range(split * items_per_split, tl.minimum((split + 1) * items_per_split, items)):
        number = begin + item % tiles
        b = (item // tiles // heads_summed).to(tl.int64)
        h = head * heads_summed + item // tiles % heads_summed
        g = h // args.group
        x_head = h
        y_head = g
        if args.for_keys:
            x_head = g
            y_head = h
        x0 = number * block
        has_pairs = True
        if args.x.segment_ids is not None:
            has_pairs = has_visible_pairs(args, b, x0, (number + diagonal) * block, block)
        if has_pairs:
            x_at = x0 + tl.arange(0, block)
            tokens, partners = load_side(args.x, b, x_head, x_at)
            second = load_tokens(args.x.second, b, x_head, x_at, args.x.length)
            tile = load_tile(args, tokens, partners, second, b, h, x0, block)
            other = load_other(args, tile, y_head, number + diagonal, block)
            y_second = load_tokens(args.y.second, b, y_head, other.at, args.y.length)
            carried = carried_before(args, tile, other.start, True)
            weights, ds, _ = tile_ds(args, tile, other, y_second, None, carried, NEAR, True)
            summand = weights if into.of_values else ds  # [x, y]
            summand = tl.where((x_at < args.x.length)[:, None], summand, 0.0)
            if tiles_per_span > 1:
                # Tiles of a diagonal lie in squares whose distances differ by one.
                steps = other.number // tiles_per_span - number // tiles_per_span
                if args.has_low:
                    summand = tl.where(steps <= into.low_steps, 0.0, summand)
                if args.has_high:
                    summand = tl.where(steps >= into.high_steps, 0.0, summand)
            if into.slope is not None:
                start = window_start(args, x0, other.start, block)
                bias_sum, slope_sum, intercept_sum = piece_gradients(
                    args, tile, summand, start, bias_sum, slope_sum, intercept_sum
                )
            elif into.entries is not None:
                bias_sum += summand
            if into.rows is not None:
                vectors = y_second
                if not into.of_values:
                    vectors = load_tokens(args.y.term, b, h, other.at, args.y.length)
                rolled = roll_y(summand.to(vectors.dtype), args.for_keys)
                rows_sum += product(rolled, vectors, args.precision)
    program = (split * into.heads + head).to(tl.int64) * into.diagonals + diagonal_index
    entries_at = program * (2 * block) + tl.arange(0, 2 * block)
    if into.slope is not None:
        pieces_at = program * (2 * args.tables.curve.block)
        pieces_at += tl.arange(0, 2 * args.tables.curve.block)
        tl.store(into.slope + pieces_at, slope_sum)
        tl.store(into.intercept + pieces_at, intercept_sum)
    if into.entries is not None:
        tl.store(into.entries + entries_at, tl.sum(roll_x(bias_sum, args.for_keys), 0))
    if into.rows is not None:
        column_at = tl.arange(0, row_block)
        rows = into.rows + entries_at[:, None] * into.width + column_at[None, :]
        tl.store(rows, rows_sum, mask=(column_at < into.width)[None, :])


@triton.jit
def _block_of_tokens(length, heads, block: tl.constexpr):
    """Batch row and head of a program, and its tokens."""
    blocks = tl.cdiv(length, block)
    lane = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * block + tl.arange(0, block)
    return (lane // heads).to(tl.int64), lane % heads, at


@triton.jit
def delta_kernel(a, b, out, length, heads, block: tl.constexpr):
    """``out[b, h, l] = a[b, h, l] · b[b, h, l]``: delta, of the gradients and the outputs."""
    row, head, at = _block_of_tokens(length, heads, block)
    left = load_tokens(a, row, head, at, length).to(tl.float32)
    right = load_tokens(b, row, head, at, length).to(tl.float32)
    store_numbers(out, row, head, tl.sum(left * right, 1), at, length)


@triton.jit
def ends_kernel(tokens, table, first, last, count, length, heads, block: tl.constexpr):
    """Products ``[B, H, L]`` of tokens with the first and the last row of a table."""
    row, head, at = _block_of_tokens(length, heads, block)
    vectors = load_tokens(tokens, row, head, at, length).to(tl.float32)
    products = tl.sum(vectors * load_row(table, head, 0)[None, :], 1)
    store_numbers(first, row, head, products, at, length)
    products = tl.sum(vectors * load_row(table, head, count - 1)[None, :], 1)
    store_numbers(last, row, head, products, at, length)
