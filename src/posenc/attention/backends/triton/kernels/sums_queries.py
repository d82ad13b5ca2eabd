"""dQ of blocks of queries, of attention with carried sums.

The gradient of an addend is the sum of those of the logarithms of weights (stick breaking), or of
counts, over the key and those before it: it is carried from the first key to the last. The sums
before each tile of keys are written for ``sums_keys_kernel``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Carries, Dropout, XTile
from posenc.attention.backends.triton.kernels.configs import SUMS_QUERIES, fitting_sums
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    clip,
    load_numbers,
    load_tokens,
    product,
    start_of,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.pairs import store_pairs
from posenc.attention.backends.triton.kernels.sums import (
    fraction,
    last_entries,
    pairs_of,
    query_block,
    rows_of,
    self_weights,
    sums_until,
    tile_gradients,
    tile_products,
    triangle,
    undropped_pairs,
    visible_pairs,
)
from posenc.attention.backends.triton.kernels.visibility import visible_tile_ranges


@triton.jit
def _walk(
    dq,
    d_sums,
    ds_sum,
    fraction_sum,
    begin,
    end,
    x_tile,
    pairs,
    first_tiles,
    carries,
    into,
    after_ones,
    until_ones,
    x,
    y,
    band,
    dropout,
    g,
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
    """Tiles ``begin`` to ``end``; ``far``: all sums are at their limit."""
    at = x_tile.start + tl.arange(0, block_q)
    inside = at < x.length
    if not sticks:
        rows = rows_of(x_tile.start, x.length, width, block_q)
    if far:
        last = last_entries(pairs, rows, width)
    for tile in range(begin, end):
        y0 = tile * block_k
        y_at = y0 + tl.arange(0, block_k)
        k, _, logits, dp = tile_products(x_tile, y, g, y_at, scale, precision)
        if dropout is not None:
            keep = undropped_pairs(
                dropout, x_tile.lane, x_tile.start, y0, query_start, False, block_q, block_k
            )
            dp = tl.where(keep, dp * dropout.factor, 0.0)
        if far:
            dz = tl.exp2(logits + (last - x_tile.lse)[:, None]) * (dp - x_tile.delta[:, None])
            ds_sum += tl.sum(dz, 1)
        else:
            shown = None
            if masked:
                shown = visible_pairs(
                    x, y, band, x_tile.b, x_tile.start, y0, False, block_q, block_k
                )
            carries_at = tile * x.length + at
            stored = inside & (tile >= first_tiles)
            carried = tl.load(carries.sums + carries_at, mask=stored, other=limit)
            tl.store(carries.d_sums + carries_at, d_sums, mask=inside)
            of_row = None
            if not sticks:
                of_row = rows[:, None]
            _, dz, tile_d_sum, ds, sums, after = tile_gradients(
                logits, dp, shown, pairs, of_row, carried[:, None], d_sums[:, None],
                x_tile.lse[:, None], x_tile.delta[:, None], limit, after_ones, until_ones, sticks,
                masked, bits, terms, 1,
            )
            d_sums += tile_d_sum
            if not sticks:
                count = sums >> bits
                # Gradients by count without atomics: each count has a last key, since those of
                # neighbours are at most one apart; the running sums there are written, and their
                # differences taken by the host.
                ends = (count != after >> bits) & inside[:, None]
                ds_fraction = ds * (fraction(sums, bits) - 1)
                ds_sums = sums_until(ds, until_ones, terms, 1) + ds_sum[:, None]
                fraction_sums = (
                    sums_until(ds_fraction, until_ones, terms, 1) + fraction_sum[:, None]
                )
                ds_sum += tl.sum(ds, 1)
                fraction_sum += tl.sum(ds_fraction, 1)
                pair_ends = pairs_of(into.ends, x_tile.start, x.length, x_tile.lane, width)
                store_pairs(pair_ends, of_row + count, ds_sums, fraction_sums, ends)
        dq += product(dz.to(k.dtype), k, precision)
    return dq, d_sums, ds_sum, fraction_sum


@triton.autotune(
    configs=SUMS_QUERIES, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def sums_queries_kernel(
    x,
    y,
    band,
    sizes,
    dropout,
    pairs,
    carries,
    into,
    scale,
    limit,
    query_start,
    key,
    edged: tl.constexpr,
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
    """Gradients of one block of queries, and what ``sums_keys_kernel`` reads.

    Args:
        carries: ``Carries``; its ``d_sums`` are written.
        into: ``SumGradients``.
        query_start: number of the first query, for dropout.
    """
    if dropout is not None:
        dropout = Dropout(dropout.threshold, dropout.factor, tl.load(dropout.seed))
    x0, lane, b, h, g, at = query_block(x, sizes, block_q)
    tokens = load_tokens(x.tokens, b, h, at, x.length)
    d_out = load_tokens(x.second, b, h, at, x.length)
    first_tiles = carries.first_tiles + lane.to(tl.int64) * x.length + at
    first_tiles = tl.load(first_tiles, mask=at < x.length, other=2**30)
    reached = tl.min(first_tiles, 0)
    begin, clear, _, _, edge, end = visible_tile_ranges(
        x, y, band, b, x0, False, False, summary_block, block_q, block_k, block_q, block_k
    )
    ds_sum = tl.zeros([block_q], tl.float32)
    d_sums = ds_sum
    padding_lse = float("-inf") if sticks else float("inf")
    lse = load_numbers(start_of(x.lse, b, h), at, x.length, padding_lse)
    delta = ds_sum
    self_pairs = None
    if sticks:
        begin = clip(reached, begin, end)
        clear = tl.maximum(clear, begin)
        if rest_to_self:
            factor = self_weights(
                x, y, band, dropout, b, lane, x0, query_start, False, block_q, block_k
            )
            v = load_tokens(y.second, b, g, tl.maximum(at - band.origin, 0), y.length)
            of_self = tl.sum(d_out.to(tl.float32) * v.to(tl.float32), 1)
            d_sums = factor * tl.exp2(lse) * of_self
    else:
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        delta = load_numbers(start_of(x.delta, b, h), at, x.length, 0.0)
        self_pairs = pairs_of(pairs, x0, x.length, lane, width)
    near = clip(reached, clear, tl.maximum(edge, clear))
    edge = tl.maximum(edge, near)
    base = lane.to(tl.int64) * tl.cdiv(y.length, block_k) * x.length
    x_tile = XTile(tokens, None, d_out, None, None, None, None, lse, delta, x0, b, h, lane)
    of_lane = Carries(carries.sums + base, carries.d_sums + base, carries.first_tiles)
    after_ones = triangle(block_k, True)
    until_ones = triangle(block_k, False).to(tl.bfloat16)
    dq = tl.zeros([block_q, x.tokens.block], tl.float32)
    fraction_sum = ds_sum
    if edged:
        dq, d_sums, ds_sum, fraction_sum = _walk(
            dq, d_sums, ds_sum, fraction_sum, begin, clear, x_tile, self_pairs, first_tiles,
            of_lane, into, after_ones, until_ones, x, y, band, dropout, g, query_start, scale,
            limit, sticks, False, True, width, bits, terms, precision, block_q, block_k,
        )
    if not sticks:
        far = tl.zeros([block_q], tl.float32)
        dq, d_sums, far, fraction_sum = _walk(
            dq, d_sums, far, fraction_sum, clear, near, x_tile, self_pairs, first_tiles, of_lane,
            into, after_ones, until_ones, x, y, band, dropout, g, query_start, scale, limit, sticks,
            True, False, width, bits, terms, precision, block_q, block_k,
        )
        tl.store(into.far + lane.to(tl.int64) * x.length + at, far, mask=at < x.length)
    dq, d_sums, ds_sum, fraction_sum = _walk(
        dq, d_sums, ds_sum, fraction_sum, near, edge, x_tile, self_pairs, first_tiles, of_lane,
        into, after_ones, until_ones, x, y, band, dropout, g, query_start, scale, limit, sticks,
        False, False, width, bits, terms, precision, block_q, block_k,
    )
    dq, d_sums, ds_sum, fraction_sum = _walk(
        dq, d_sums, ds_sum, fraction_sum, edge, end, x_tile, self_pairs, first_tiles, of_lane, into,
        after_ones, until_ones, x, y, band, dropout, g, query_start, scale, limit, sticks, False,
        True, width, bits, terms, precision, block_q, block_k,
    )
    if not sticks:
        pair_ends = pairs_of(into.ends, x0, x.length, lane, width)
        rows = rows_of(x0, x.length, width, block_q)
        store_pairs(pair_ends, rows, ds_sum, fraction_sum, at < x.length)
    store_tokens(into.tokens, b, h, dq * scale, at, x.length)
