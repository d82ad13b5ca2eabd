"""dQ of blocks of queries, and dK and dV of blocks of keys, of attention with carried sums.

The gradient of an addend is the sum of those of the logarithms of weights (stick breaking), or of
counts, over the key and those before it: it is carried from the first key to the last. The sums
before each tile of keys are written by ``sums_queries_kernel`` for ``sums_keys_kernel``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.configs import SUMS_KEYS, SUMS_QUERIES, fitting_sums
from posenc.attention.backends.triton.kernels.logits import load_tile, query_tile, weight_shift
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    by_query,
    clip,
    load_numbers,
    load_tokens,
    product,
    start_of,
    store_pairs,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.sums import (
    at_most,
    binary_logits,
    carried_at,
    entries,
    fraction,
    gates_of,
    last_entries,
    pairs_of,
    query_pairs,
    self_weights,
    softplus,
    sums_after,
    sums_until,
    to_integer,
    triangle,
)
from posenc.attention.backends.triton.kernels.visibility import (
    undropped,
    visible,
    visible_tile_ranges,
)


class _OfQueries(NamedTuple):
    """Numbers of the queries of a tile.

    Args:
        pairs: as of ``query_pairs``; shift: as of ``weight_shift``; delta: as of ``Side``.
        carried: sums before the tile; d_sums: those of gradients.
    """

    pairs: Any
    shift: Any
    delta: Any
    carried: Any
    d_sums: Any


@triton.jit
def _tile_products(args, tile, head, number, block: tl.constexpr):
    """Read tile ``number`` of y: tokens, ``second``, logits, gradients of weights before dropout,
    and which pairs it keeps."""
    at = number * block + tl.arange(0, block)
    tokens = load_tokens(args.y.tokens, tile.b, head, at, args.y.length)
    second = load_tokens(args.y.second, tile.b, head, at, args.y.length)
    logits = binary_logits(args, tile, tokens)
    dp = product(tile.second, tl.trans(second), args.precision)
    keep = True
    if args.dropout is not None:
        keep = undropped(args, tile, number * block, block)
        dp = tl.where(keep, dp * args.dropout.factor, 0.0)
    return tokens, second, logits, dp, keep


@triton.jit
def _far_gradients(args, logits, dp, last, shift, delta):
    """Weights and ds of a tile all of whose counts are at their limit, with ``last_entries``."""
    weights = tl.exp2(logits + by_query(last - shift, args.for_keys))
    return weights, weights * (dp - by_query(delta, args.for_keys))


@triton.jit
def _tile_gradients(args, logits, dp, shown, queries, ones, masked: tl.constexpr):
    """Weights, gradients of logits, and sums over the keys, of one tile.

    Args:
        dp: gradients of weights; queries: ``_OfQueries``.
        ones: triangles as of ``sums_after`` and ``sums_until``.

    Returns:
        Weights, gradients of logits (dz), and sums of the addends' gradients over each row; of
        contextual positions also ds, by which products are weighted, the sums, and those of the
        next keys.
    """
    after_ones, until_ones = ones
    carried = by_query(queries.carried, args.for_keys)
    d_sums = by_query(queries.d_sums, args.for_keys)
    if args.sums.sticks:
        added = softplus(logits)
        beta = tl.exp2(logits - added)
        if masked:
            added = tl.where(shown, added, 0.0)
        sums = sums_after(args, added, after_ones, carried)
        weights = tl.exp2(logits - sums)
        if masked:
            weights = tl.where(shown, weights, 0.0)
        d_addend = weights * dp
        ds = d_addend
        dz = d_addend - beta * (sums_until(args, d_addend, until_ones) + d_sums)
        after = sums
    else:
        gates, slope = gates_of(logits)
        added = to_integer(gates, args.sums.bits)
        if masked:
            added = tl.where(shown, added, 0)
        sums = sums_after(args, added, after_ones, carried)
        after = at_most(sums - added, args.sums.limit)
        sums = at_most(sums, args.sums.limit)
        more, rise = entries(args, queries.pairs, sums)
        weights = tl.exp2(logits + more - by_query(queries.shift, args.for_keys))
        if masked:
            weights = tl.where(shown, weights, 0.0)
        ds = weights * (dp - by_query(queries.delta, args.for_keys))
        d_addend = ds * rise / LOG2E
        dz = ds + slope * (sums_until(args, d_addend, until_ones) + d_sums)
    if masked:
        dz = tl.where(shown, dz, 0.0)
    return weights, dz, tl.sum(d_addend, 0 if args.for_keys else 1), ds, sums, after


class _QueryState(NamedTuple):
    """Sums of a block of queries so far.

    ``dq [x, D]``; ``d_sums [x]``, of the gradients of addends; of contextual positions also
    ``ds [x]`` and ``fractions [x]``, of the gradients of logits and of their fractions' shares.
    """

    dq: Any
    d_sums: Any
    ds: Any
    fractions: Any


@triton.jit
def _walk_keys(
    args, state, tile, carries, first_tiles, ends, ones, begin, end, far: tl.constexpr,
    masked: tl.constexpr, block_k: tl.constexpr,
):
    """Tiles ``begin`` to ``end`` of keys; ``far``: all sums are at their limit.

    Args:
        first_tiles: of the queries, as of ``Carries``; ends: as of ``sums_queries_kernel``.
    """
    dq, d_sums, ds_sum, fraction_sum = state
    inside = tile.at < args.x.length
    pairs = query_pairs(args, tile.lane, tile.start, args.x.length, tile.at.shape[0])
    shift = weight_shift(tile.lse)
    if far:
        last = last_entries(args, pairs)
    for number in range(begin, end):
        k, _, logits, dp, _ = _tile_products(args, tile, tile.h // args.group, number, block_k)
        if far:
            _, dz = _far_gradients(args, logits, dp, last, shift, tile.delta)
            ds_sum += tl.sum(dz, 1)
        else:
            shown = None
            if masked:
                y_at = number * block_k + tl.arange(0, block_k)
                shown = visible(args, tile.b, tile.at, y_at)
            sums_at = carried_at(args, tile.lane, number, block_k) + tile.at
            stored = inside & (number >= first_tiles)
            carried = tl.load(carries.sums + sums_at, mask=stored, other=args.sums.limit)
            tl.store(carries.d_sums + sums_at, d_sums, mask=inside)
            queries = _OfQueries(pairs, shift, tile.delta, carried, d_sums)
            _, dz, tile_d_sum, ds, sums, after = _tile_gradients(
                args, logits, dp, shown, queries, ones, masked
            )
            d_sums += tile_d_sum
            if not args.sums.sticks:
                count = sums >> args.sums.bits
                # Gradients by count without atomics: each count has a last key, since those of
                # neighbours are at most one apart; the running sums there are written, and their
                # differences taken by the host.
                is_last = (count != after >> args.sums.bits) & inside[:, None]
                ds_fraction = ds * (fraction(sums, args.sums.bits) - 1)
                ds_sums = sums_until(args, ds, ones[1]) + ds_sum[:, None]
                fraction_sums = sums_until(args, ds_fraction, ones[1]) + fraction_sum[:, None]
                ds_sum += tl.sum(ds, 1)
                fraction_sum += tl.sum(ds_fraction, 1)
                pointer, places = pairs_of(
                    args, ends, tile.lane, tile.start, args.x.length, tile.at.shape[0]
                )
                store_pairs(pointer, places[:, None] + count, ds_sums, fraction_sums, is_last)
        dq += product(dz.to(k.dtype), k, args.precision)
    return _QueryState(dq, d_sums, ds_sum, fraction_sum)


@triton.autotune(
    configs=SUMS_QUERIES, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def sums_queries_kernel(
    args, into, ends, far, carries, key, block_k: tl.constexpr, block_q: tl.constexpr
):
    """Gradients of one block of queries, and what ``sums_keys_kernel`` reads.

    Args:
        into: where those of queries go.
        ends: ``[lane, query, n]``, of contextual positions: pairs, sums of the gradients of logits
            with counts of at least n, and of their fractions' shares.
        far: ``[lane, query]``, sums of those at the limit that are not in either.
        carries: ``Carries``; its ``d_sums`` are written.
    """
    tile = query_tile(args, block_q)
    lane_start = tile.lane.to(tl.int64) * args.x.length
    inside = tile.at < args.x.length
    first_tiles = tl.load(carries.first_tiles + lane_start + tile.at, mask=inside, other=2**30)
    reached = tl.min(first_tiles, 0)
    ranges = visible_tile_ranges(args, tile.b, tile.start, block_q, block_k)
    begin, clear = ranges.begin, ranges.clear
    zeros = tl.zeros([block_q], tl.float32)
    d_sums = zeros
    if args.sums.sticks:
        begin = clip(reached, begin, ranges.end)
        clear = tl.maximum(clear, begin)
        if args.sums.rest_to_self:
            own_at = tl.maximum(tile.at - args.band.origin, 0)
            v = load_tokens(args.y.second, tile.b, tile.h // args.group, own_at, args.y.length)
            of_self = tl.sum(tile.second.to(tl.float32) * v.to(tl.float32), 1)
            d_sums = self_weights(args, tile, block_k) * tl.exp2(tile.lse) * of_self
    near = clip(reached, clear, tl.maximum(ranges.edge, clear))
    edge = tl.maximum(ranges.edge, near)
    ones = (triangle(block_k, True), triangle(block_k, False).to(tl.bfloat16))
    state = _QueryState(tl.zeros([block_q, args.x.tokens.block], tl.float32), d_sums, zeros, zeros)
    if args.edged:
        state = _walk_keys(
            args, state, tile, carries, first_tiles, ends, ones, begin, clear, False, True, block_k
        )
    if not args.sums.sticks:
        at_limit = _QueryState(state.dq, state.d_sums, zeros, state.fractions)
        at_limit = _walk_keys(
            args, at_limit, tile, carries, first_tiles, ends, ones, clear, near, True, False,
            block_k,
        )
        tl.store(far + lane_start + tile.at, at_limit.ds, mask=inside)
        state = _QueryState(at_limit.dq, at_limit.d_sums, state.ds, at_limit.fractions)
    state = _walk_keys(
        args, state, tile, carries, first_tiles, ends, ones, near, edge, False, False, block_k
    )
    state = _walk_keys(
        args, state, tile, carries, first_tiles, ends, ones, edge, ranges.end, False, True, block_k
    )
    if not args.sums.sticks:
        pointer, places = pairs_of(args, ends, tile.lane, tile.start, args.x.length, block_q)
        store_pairs(pointer, places, state.ds, state.fractions, inside)
    store_tokens(into, tile.b, tile.h, state.dq * args.scale, tile.at, args.x.length)


@triton.jit
def _walk_queries(
    args, dk, dv, tile, key_number, carries, ones, begin, end, far: tl.constexpr,
    masked: tl.constexpr, block_q: tl.constexpr,
):
    """Tiles ``begin`` to ``end`` of queries; ``far``: all sums are at their limit.

    ``key_number`` is that of the tile of keys.
    """
    for number in range(begin, end):
        y_at = number * block_q + tl.arange(0, block_q)
        inside = y_at < args.y.length
        q, d_out, logits, dp, keep = _tile_products(args, tile, tile.h, number, block_q)
        shift = 0.0
        delta = 0.0
        if not args.sums.sticks:
            shift = load_numbers(args.y.lse, tile.b, tile.h, y_at, args.y.length, float("-inf"))
            shift = weight_shift(shift)
            delta = load_numbers(args.y.delta, tile.b, tile.h, y_at, args.y.length, 0.0)
        pairs = query_pairs(args, tile.lane, number * block_q, args.y.length, block_q)
        if far:
            last = last_entries(args, pairs)
            weights, dz = _far_gradients(args, logits, dp, last, shift, delta)
        else:
            shown = None
            if masked:
                shown = visible(args, tile.b, tile.at, y_at)
                shown = shown & (tile.at < args.x.length)[:, None]
            first = carries.first_tiles + tile.lane.to(tl.int64) * args.y.length + y_at
            stored = inside & (key_number >= tl.load(first, mask=inside, other=2**30))
            sums_at = carried_at(args, tile.lane, key_number, tile.at.shape[0]) + y_at
            carried = tl.load(carries.sums + sums_at, mask=stored, other=args.sums.limit)
            d_sums = tl.load(carries.d_sums + sums_at, mask=stored, other=0.0)
            if masked:  # queries that see none of the keys have left no sums
                carried = clip(carried, 0, args.sums.limit)
            queries = _OfQueries(pairs, shift, delta, carried, d_sums)
            weights, dz, _, _, _, _ = _tile_gradients(
                args, logits, dp, shown, queries, ones, masked
            )
        if args.dropout is not None:
            weights = tl.where(keep, weights * args.dropout.factor, 0.0)
        dv += product(weights.to(d_out.dtype), d_out, args.precision)
        dk += product(dz.to(q.dtype), q, args.precision)
    return dk, dv


@triton.autotune(
    configs=SUMS_KEYS, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def sums_keys_kernel(
    args, into, second, carries, key, block_k: tl.constexpr, block_q: tl.constexpr
):
    """One block of keys and values of one of their heads, with all query heads that share it.

    Args:
        into, second: where the gradients of keys and of values go.
        carries: ``Carries``.
    """
    blocks = tl.cdiv(args.x.length, block_k)
    number = tl.program_id(0) % blocks
    x0 = number * block_k
    at = x0 + tl.arange(0, block_k)
    heads = args.heads // args.group
    lane = tl.program_id(0) // blocks
    b = (lane // heads).to(tl.int64)
    g = lane % heads
    k = load_tokens(args.x.tokens, b, g, at, args.x.length)
    v = load_tokens(args.x.second, b, g, at, args.x.length)
    ranges = visible_tile_ranges(args, b, x0, block_k, block_q)
    clear, edge = ranges.clear, ranges.edge
    if x0 + block_k > args.x.length:  # keys that are not there would be summed up
        clear = ranges.end
        edge = ranges.end
    ones = (triangle(block_k, False), triangle(block_k, True).to(tl.bfloat16))
    dk = tl.zeros([block_k, args.x.tokens.block], tl.float32)
    dv = tl.zeros([block_k, args.x.second.block], tl.float32)
    for member in range(args.group):
        h = g * args.group + member
        tile = load_tile(args, k, k, v, b, h, x0, block_k)
        # Queries up to the last one whose sum at this tile is below the limit: all later ones read
        # the highest count here (or, of sticks, have no weight).
        last = -1
        chunk: tl.constexpr = 256
        for start in range(0, args.y.length, chunk):
            query_at = start + tl.arange(0, chunk)
            first = carries.first_tiles + tile.lane.to(tl.int64) * args.y.length + query_at
            reached = tl.load(first, mask=query_at < args.y.length, other=2**30) <= number
            last = tl.maximum(last, tl.max(tl.where(reached, query_at, -1), 0))
        near = (last + block_q) // block_q
        stop = ranges.end
        if args.sums.sticks:
            stop = clip(near, ranges.begin, stop)
        first_clear = tl.minimum(clear, stop)
        first_edge = tl.minimum(edge, stop)
        near = clip(near, first_clear, first_edge)
        dk, dv = _walk_queries(
            args, dk, dv, tile, number, carries, ones, ranges.begin, first_clear, False, True,
            block_q,
        )
        dk, dv = _walk_queries(
            args, dk, dv, tile, number, carries, ones, first_clear, near, False, False, block_q
        )
        if not args.sums.sticks:
            dk, dv = _walk_queries(
                args, dk, dv, tile, number, carries, ones, near, first_edge, True, False, block_q
            )
        dk, dv = _walk_queries(
            args, dk, dv, tile, number, carries, ones, first_edge, stop, False, True, block_q
        )
        if args.sums.sticks and args.sums.rest_to_self:
            query = at - args.band.origin
            inside = (query >= 0) & (query < args.y.length)
            rest = tl.load(start_of(args.y.lse, b, h) + query, mask=inside, other=0.0)
            d_out = load_tokens(args.y.second, b, h, tl.maximum(query, 0), args.y.length)
            factor = self_weights(args, tile, block_q)
            dv += (factor * tl.exp2(rest))[:, None] * d_out.to(tl.float32)
    store_tokens(into, b, g, dk * args.scale, at, args.x.length)
    store_tokens(second, b, g, dv, at, args.x.length)
