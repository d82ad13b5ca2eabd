"""Attention with sums carried from the last tile of keys to the first; and those sums by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Dropout, XTile
from posenc.attention.backends.triton.kernels.configs import (
    SUMS_FORWARD,
    SUMS_QUERIES,
    fitting_sums,
)
from posenc.attention.backends.triton.kernels.logits import softmax_step
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    load_tokens,
    product,
    start_of,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.sums import (
    addends,
    at_most,
    binary_logits,
    entries,
    last_entries,
    pairs_of,
    query_block,
    rows_of,
    self_weights,
    sums_after,
    triangle,
    undropped_pairs,
    visible_pairs,
)
from posenc.attention.backends.triton.kernels.visibility import visible_tile_ranges

STRIDE = tl.constexpr(4)
"""Tiles between two looks at whether all sums are at their limit."""


@triton.jit
def _walk(
    output,
    row_sum,
    row_max,
    carried,
    begin,
    end,
    x_tile,
    pairs,
    ones,
    x,
    y,
    band,
    dropout,
    g,
    scale,
    limit,
    sticks: tl.constexpr,
    far: tl.constexpr,
    masked: tl.constexpr,
    width: tl.constexpr,
    bits: tl.constexpr,
    precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Tiles from ``end - 1`` down to ``begin``; ``far``: all sums are at their limit.

    ``carried [x]`` are the sums over the keys after a tile.
    """
    if not sticks:
        rows = rows_of(x_tile.start, x.length, width, block_x)
    if far:
        last = last_entries(pairs, rows, width)
    for step in range(end - begin):
        y0 = (end - 1 - step) * block_y
        y_at = y0 + tl.arange(0, block_y)
        k = load_tokens(y.tokens, x_tile.b, g, y_at, y.length)
        logits = binary_logits(x_tile.tokens, k, scale, precision)
        shown = None
        if masked:
            shown = visible_pairs(x, y, band, x_tile.b, x_tile.start, y0, False, block_x, block_y)
        if far:
            logits += last[:, None]
        else:
            added = addends(logits, shown, sticks, masked, bits)
            sums = sums_after(added, ones, carried[:, None], sticks, bits, 1)  # [x, y]
            carried += tl.sum(added, 1)
            if sticks:
                logits -= sums
            else:
                carried = at_most(carried, limit)
                more, _ = entries(pairs, rows[:, None], at_most(sums, limit), bits)
                logits += more
        if masked:
            logits = tl.where(shown, logits, float("-inf"))
        if sticks:
            weights = tl.exp2(logits)
        else:
            weights, rescale, row_max, row_sum = softmax_step(logits, row_max, row_sum)
            output *= rescale[:, None]
        if dropout is not None:
            keep = undropped_pairs(
                dropout, x_tile.lane, x_tile.start, y0, 0, False, block_x, block_y
            )
            weights = tl.where(keep, weights * dropout.factor, 0.0)
        v = load_tokens(y.second, x_tile.b, g, y_at, y.length)
        output += product(weights.to(v.dtype), v, precision)
    return output, row_sum, row_max, carried


@triton.autotune(
    configs=SUMS_FORWARD, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def sums_forward_kernel(
    x,
    y,
    tables,
    band,
    sizes,
    dropout,
    pairs,
    output,
    lse,
    scale,
    limit,
    key,
    edged: tl.constexpr,
    sticks: tl.constexpr,
    rest_to_self: tl.constexpr,
    width: tl.constexpr,
    bits: tl.constexpr,
    summary_block: tl.constexpr,
    precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """One block of queries of one head.

    Args:
        tables: none.
        edged: the first keys may be hidden from any of the queries.
        pairs: of contextual positions, as of ``entries``, ``width`` of them a query.
        lse: of stick breaking, binary logarithms of what is left.
        limit: of the sums; all beyond count as it.
    """
    if dropout is not None:
        dropout = Dropout(dropout.threshold, dropout.factor, tl.load(dropout.seed))
    x0, lane, b, h, g, at = query_block(x, sizes, block_x)
    tokens = load_tokens(x.tokens, b, h, at, x.length)
    x_tile = XTile(tokens, None, None, None, None, None, None, None, None, x0, b, h, lane)
    self_pairs = None
    if not sticks:
        self_pairs = pairs_of(pairs, x0, x.length, lane, width)
    begin, clear, _, _, edge, end = visible_tile_ranges(
        x, y, band, b, x0, False, False, summary_block, block_x, block_y, block_x, block_y
    )
    ones = triangle(block_y, True)
    result = tl.zeros([block_x, y.second.block], tl.float32)
    row_sum = tl.zeros([block_x], tl.float32)
    row_max = row_sum - float("inf")
    carried = tl.zeros([block_x], tl.float32 if sticks else tl.int32)
    result, row_sum, row_max, carried = _walk(
        result, row_sum, row_max, carried, edge, end, x_tile, self_pairs, ones, x, y, band, dropout,
        g, scale, limit, sticks, False, True, width, bits, precision, block_x, block_y,
    )
    # Until the sums of all queries are at their limit: no earlier key changes them then.
    stop = edge
    while (stop > clear) & (tl.min(carried, 0) < limit):
        first = tl.maximum(stop - STRIDE, clear)
        result, row_sum, row_max, carried = _walk(
            result, row_sum, row_max, carried, first, stop, x_tile, self_pairs, ones, x, y, band,
            dropout, g, scale, limit, sticks, False, False, width, bits, precision, block_x,
            block_y,
        )
        stop = first
    if sticks:
        begin = tl.where(tl.min(carried, 0) < limit, begin, clear)
    else:
        result, row_sum, row_max, carried = _walk(
            result, row_sum, row_max, carried, clear, stop, x_tile, self_pairs, ones, x, y, band,
            dropout, g, scale, limit, sticks, True, False, width, bits, precision, block_x, block_y,
        )
    if edged:
        result, row_sum, row_max, carried = _walk(
            result, row_sum, row_max, carried, begin, clear, x_tile, self_pairs, ones, x, y, band,
            dropout, g, scale, limit, sticks, False, True, width, bits, precision, block_x, block_y,
        )
    if sticks:
        row_lse = -carried
        if rest_to_self:
            factor = self_weights(x, y, band, dropout, b, lane, x0, 0, False, block_x, block_y)
            v = load_tokens(y.second, b, g, tl.maximum(at - band.origin, 0), y.length)
            result += (factor * tl.exp2(row_lse))[:, None] * v.to(tl.float32)
    else:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
        result /= row_sum[:, None]
        row_lse = (row_max + tl.log2(row_sum)) / LOG2E
    store_tokens(output, b, h, result, at, x.length)
    tl.store(start_of(lse, b, h) + at, row_lse, mask=at < x.length)


@triton.jit
def _carry(
    carried,
    begin,
    end,
    x_tile,
    sums,
    x,
    y,
    band,
    g,
    scale,
    limit,
    sticks: tl.constexpr,
    masked: tl.constexpr,
    bits: tl.constexpr,
    precision: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    """Write the sums over the keys after each tile from ``end - 1`` down to ``begin``."""
    at = x_tile.start + tl.arange(0, block_q)
    for step in range(end - begin):
        tile = end - 1 - step
        tl.store(sums + tile * x.length + at, carried, mask=at < x.length)
        y0 = tile * block_k
        k = load_tokens(y.tokens, x_tile.b, g, y0 + tl.arange(0, block_k), y.length)
        logits = binary_logits(x_tile.tokens, k, scale, precision)
        shown = None
        if masked:
            shown = visible_pairs(x, y, band, x_tile.b, x_tile.start, y0, False, block_q, block_k)
        carried += tl.sum(addends(logits, shown, sticks, masked, bits), 1)
        if not sticks:
            carried = at_most(carried, limit)
    return carried


@triton.autotune(
    configs=SUMS_QUERIES, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def carries_kernel(
    x,
    y,
    band,
    sizes,
    sums,
    first_tiles,
    scale,
    limit,
    key,
    edged: tl.constexpr,
    sticks: tl.constexpr,
    bits: tl.constexpr,
    summary_block: tl.constexpr,
    precision: tl.constexpr,
    block_k: tl.constexpr,
    block_q: tl.constexpr,
):
    """Sums ``[lane, tile, query]`` before each tile of ``block_k`` keys, from the last on.

    ``first_tiles [lane, query]`` says from which tile on there are any; before, all sums are at
    their limit.
    """
    x0, lane, b, h, g, at = query_block(x, sizes, block_q)
    tokens = load_tokens(x.tokens, b, h, at, x.length)
    x_tile = XTile(tokens, None, None, None, None, None, None, None, None, x0, b, h, lane)
    begin, clear, _, _, edge, end = visible_tile_ranges(
        x, y, band, b, x0, False, False, summary_block, block_q, block_k, block_q, block_k
    )
    of_lane = sums + lane.to(tl.int64) * tl.cdiv(y.length, block_k) * x.length
    carried = tl.zeros([block_q], tl.float32 if sticks else tl.int32)
    carried = _carry(
        carried, edge, end, x_tile, of_lane, x, y, band, g, scale, limit, sticks, True, bits,
        precision, block_q, block_k,
    )
    stop = edge
    while (stop > clear) & (tl.min(carried, 0) < limit):
        first = tl.maximum(stop - STRIDE, clear)
        carried = _carry(
            carried, first, stop, x_tile, of_lane, x, y, band, g, scale, limit, sticks, False, bits,
            precision, block_q, block_k,
        )
        stop = first
    # What is at the limit stays there: of tiles with hidden pairs no sums are needed then.
    first = tl.where(tl.min(carried, 0) < limit, begin, stop)
    if edged:
        _carry(
            carried, first, tl.minimum(stop, tl.maximum(first, clear)), x_tile, of_lane, x, y, band,
            g, scale, limit, sticks, True, bits, precision, block_q, block_k,
        )
    first_tiles_at = first_tiles + lane.to(tl.int64) * x.length + at
    tl.store(first_tiles_at, tl.zeros([block_q], tl.int32) + first, mask=at < x.length)
