"""dK and dV of blocks of keys, of attention with carried sums."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Dropout, XTile
from posenc.attention.backends.triton.kernels.configs import SUMS_KEYS, fitting_sums
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    clip,
    load_numbers,
    load_tokens,
    product,
    start_of,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.sums import (
    last_entries,
    pairs_of,
    rows_of,
    self_weights,
    tile_gradients,
    tile_products,
    triangle,
    undropped_pairs,
    visible_pairs,
)
from posenc.attention.backends.triton.kernels.visibility import visible_tile_ranges


@triton.jit
def _walk(
    dk,
    dv,
    begin,
    end,
    x_tile,
    pairs,
    carries,
    tile,
    after_ones,
    until_ones,
    x,
    y,
    band,
    dropout,
    query_start,
    scale,
    limit,
    sticks: tl.constexpr,
    far: tl.constexpr,
    masked: tl.constexpr,
    width: tl.constexpr,
    bits: tl.constexpr,
    terms: tl.constexpr,
    precision: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    """Tiles of queries ``begin`` to ``end``; ``far``: all sums are at their limit."""
    for step in range(begin, end):
        y0 = step * block_q
        y_at = y0 + tl.arange(0, block_q)
        q, d_out, logits, dp = tile_products(x_tile, y, x_tile.h, y_at, scale, precision)
        if dropout is not None:
            keep = undropped_pairs(
                dropout, x_tile.lane, x_tile.start, y0, query_start, True, block_k, block_q
            )
            dp = tl.where(keep, dp * dropout.factor, 0.0)
        lse = None
        delta = None
        self_pairs = None
        rows = None
        if not sticks:
            lse = load_numbers(start_of(y.lse, x_tile.b, x_tile.h), y_at, y.length, float("inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)[None, :]
            delta = load_numbers(start_of(y.delta, x_tile.b, x_tile.h), y_at, y.length, 0.0)
            delta = delta[None, :]
            self_pairs = pairs_of(pairs, y0, y.length, x_tile.lane, width)
            rows = rows_of(y0, y.length, width, block_q)[None, :]
        if far:
            weights = tl.exp2(logits + (last_entries(self_pairs, rows, width) - lse))
            dz = weights * (dp - delta)
        else:
            shown = None
            if masked:
                shown = visible_pairs(
                    x, y, band, x_tile.b, x_tile.start, y0, True, block_k, block_q
                )
                shown = shown & (x_tile.start + tl.arange(0, block_k) < x.length)[:, None]
            inside = y_at < y.length
            first = carries.first_tiles + x_tile.lane.to(tl.int64) * y.length + y_at
            stored = inside & (tile >= tl.load(first, mask=inside, other=2**30))
            carries_at = (
                x_tile.lane.to(tl.int64) * tl.cdiv(x.length, block_k) + tile
            ) * y.length + y_at
            carried = tl.load(carries.sums + carries_at, mask=stored, other=limit)
            d_sums = tl.load(carries.d_sums + carries_at, mask=stored, other=0.0)
            if masked:  # queries that see none of the keys have left no sums
                carried = clip(carried, 0, limit)
            weights, dz, _, _, _, _ = tile_gradients(
                logits, dp, shown, self_pairs, rows, carried[None, :], d_sums[None, :], lse,
                delta, limit, after_ones, until_ones, sticks, masked, bits, terms, 0,
            )
        if dropout is not None:
            weights = tl.where(keep, weights * dropout.factor, 0.0)
        dv += product(weights.to(d_out.dtype), d_out, precision)
        dk += product(dz.to(q.dtype), q, precision)
    return dk, dv


@triton.autotune(
    configs=SUMS_KEYS, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def sums_keys_kernel(
    x,
    y,
    band,
    sizes,
    dropout,
    pairs,
    carries,
    into,
    second,
    scale,
    limit,
    query_start,
    key,
    sticks: tl.constexpr,
    rest_to_self: tl.constexpr,
    width: tl.constexpr,
    bits: tl.constexpr,
    terms: tl.constexpr,
    summary_block: tl.constexpr,
    precision: tl.constexpr,
    block_k: tl.constexpr,
    block_q: tl.constexpr,
):
    """One block of keys and values of one of their heads, with all query heads that share it.

    Args:
        carries: ``Carries``.
        into, second: where the gradients of keys and of values go.
        query_start: number of the first query, for dropout.
    """
    if dropout is not None:
        dropout = Dropout(dropout.threshold, dropout.factor, tl.load(dropout.seed))
    blocks = tl.cdiv(x.length, block_k)
    tile = tl.program_id(0) % blocks
    x0 = tile * block_k
    at = x0 + tl.arange(0, block_k)
    heads = sizes.heads // sizes.group
    lane = tl.program_id(0) // blocks
    b = (lane // heads).to(tl.int64)
    g = lane % heads
    k = load_tokens(x.tokens, b, g, at, x.length)
    v = load_tokens(x.second, b, g, at, x.length)
    begin, clear, _, _, edge, end = visible_tile_ranges(
        x, y, band, b, x0, False, True, summary_block, block_k, block_q, block_k, block_q
    )
    if x0 + block_k > x.length:  # keys that are not there would be summed up
        clear = end
        edge = end
    after_ones = triangle(block_k, False)
    until_ones = triangle(block_k, True).to(tl.bfloat16)
    dk = tl.zeros([block_k, x.tokens.block], tl.float32)
    dv = tl.zeros([block_k, x.second.block], tl.float32)
    for member in range(sizes.group):
        h = g * sizes.group + member
        query_lane = (b * sizes.heads + h).to(tl.int32)
        x_tile = XTile(k, None, v, None, None, None, None, None, None, x0, b, h, query_lane)
        # Queries up to the last one whose sum at this tile is below the limit: all later ones read
        # the highest count here (or, of sticks, have no weight).
        last = -1
        chunk: tl.constexpr = 256
        for start in range(0, y.length, chunk):
            query_at = start + tl.arange(0, chunk)
            first = carries.first_tiles + query_lane.to(tl.int64) * y.length + query_at
            reached = tl.load(first, mask=query_at < y.length, other=2**30) <= tile
            last = tl.maximum(last, tl.max(tl.where(reached, query_at, -1), 0))
        near = (last + block_q) // block_q
        stop = end
        if sticks:
            stop = clip(near, begin, end)
        first_clear = tl.minimum(clear, stop)
        first_edge = tl.minimum(edge, stop)
        near = clip(near, first_clear, first_edge)
        dk, dv = _walk(
            dk, dv, begin, first_clear, x_tile, pairs, carries, tile, after_ones, until_ones, x, y,
            band, dropout, query_start, scale, limit, sticks, False, True, width, bits, terms,
            precision, block_q, block_k,
        )
        dk, dv = _walk(
            dk, dv, first_clear, near, x_tile, pairs, carries, tile, after_ones, until_ones, x, y,
            band, dropout, query_start, scale, limit, sticks, False, False, width, bits, terms,
            precision, block_q, block_k,
        )
        if not sticks:
            dk, dv = _walk(
                dk, dv, near, first_edge, x_tile, pairs, carries, tile, after_ones, until_ones, x,
                y, band, dropout, query_start, scale, limit, sticks, True, False, width, bits,
                terms, precision, block_q, block_k,
            )
        dk, dv = _walk(
            dk, dv, first_edge, stop, x_tile, pairs, carries, tile, after_ones, until_ones, x, y,
            band, dropout, query_start, scale, limit, sticks, False, True, width, bits, terms,
            precision, block_q, block_k,
        )
        if sticks and rest_to_self:
            factor = self_weights(
                x, y, band, dropout, b, query_lane, x0, query_start, True, block_k, block_q
            )
            query = at - band.origin
            inside = (query >= 0) & (query < y.length)
            rest = tl.load(start_of(y.lse, b, h) + query, mask=inside, other=0.0)
            d_out = load_tokens(y.second, b, h, tl.maximum(query, 0), y.length)
            dv += (factor * tl.exp2(rest))[:, None] * d_out.to(tl.float32)
    store_tokens(into, b, g, dk * scale, at, x.length)
    store_tokens(second, b, g, dv, at, x.length)
