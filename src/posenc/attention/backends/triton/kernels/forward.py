"""Attention of one block of queries by online softmax: the output and its log-sum-exp (lse)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Dropout, XTile
from posenc.attention.backends.triton.kernels.configs import FORWARD, fitting
from posenc.attention.backends.triton.kernels.curves import rates_of
from posenc.attention.backends.triton.kernels.logits import (
    HIGH,
    LOW,
    NEAR,
    carried_before,
    far_numbers,
    softmax_step,
    tile_logits,
    undropped,
)
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    clip,
    load_numbers,
    load_row,
    load_tokens,
    product,
    start_of,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.rotary import load_side
from posenc.attention.backends.triton.kernels.visibility import visible_tile_ranges
from posenc.attention.backends.triton.kernels.windows import rows_of_x, window_start


class _SoftmaxState(NamedTuple):
    """Sums of a block of queries so far, relative to ``row_max``.

    ``output [x, E]``; ``row_sum``, ``row_max``, and ``low`` and ``high``, the weights that read the
    first or the last row of the values' table, ``[x]``.
    """

    output: Any
    row_sum: Any
    row_max: Any
    low: Any
    high: Any


@triton.jit
def _walk(
    state,
    begin,
    end,
    x_tile,
    far,
    x,
    y,
    tables,
    band,
    sizes,
    dropout,
    scale,
    kind: tl.constexpr,
    masked: tl.constexpr,
    causal: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Tiles ``begin`` to ``end``, all of one kind: NEAR ones compute terms by pair, LOW and HIGH
    ones read one entry, and ``far [x]`` is added."""
    output, row_sum, row_max = state.output, state.row_sum, state.row_max  # [x, E], [x], [x]
    low, high = state.low, state.high
    g = x_tile.h // sizes.group
    carried = tl.zeros([1, 1], tl.float32)
    if kind == NEAR:
        carried = carried_before(
            x_tile, tables, band, begin * block_y, False, precision, False, block_x
        )
    for tile in range(begin, end):
        y0 = tile * block_y
        y_at = y0 + tl.arange(0, block_y)
        k, partners = load_side(y, x_tile.b, g, y_at)
        factor = None
        if y.factor is not None:
            factor = load_tokens(y.factor, x_tile.b, x_tile.h, y_at, y.length)
        logits, carried = tile_logits(
            x_tile, far, k, partners, factor, carried, x, y, tables, band, scale, y0, kind, masked,
            causal, False, False, precision, factor_precision, block_x, block_y,
        )
        if kind != NEAR and tables.softcap is None:
            logits += (far * LOG2E)[:, None]
        weights, rescale, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        if dropout is not None:
            keep = undropped(dropout, x_tile.lane, x_tile.start, y0, block_x, block_y, False)
            weights = tl.where(keep, weights, 0.0)
        v = load_tokens(y.second, x_tile.b, g, y_at, y.length)  # [y, E]
        output = output * rescale[:, None] + product(weights.to(v.dtype), v, precision)
        if tables.value is not None:
            low *= rescale
            high *= rescale
            if kind == NEAR:
                start = window_start(x_tile.start, y0, band.origin, block_x, False)
                output += rows_of_x(
                    weights, tables.value, x_tile.h, start, tables.count, precision, block_x, False
                )
            elif kind == LOW:
                low += tl.sum(weights, 1)
            else:
                high += tl.sum(weights, 1)
    return _SoftmaxState(output, row_sum, row_max, low, high)


@triton.autotune(configs=FORWARD, key=["key"], prune_configs_by={"early_config_prune": fitting})
@triton.jit(do_not_specialize=["key"])
def forward_kernel(
    x,
    y,
    tables,
    band,
    sizes,
    dropout,
    output,
    lse,
    scale,
    key,
    edged: tl.constexpr,
    has_low: tl.constexpr,
    has_high: tl.constexpr,
    causal: tl.constexpr,
    summary_block: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """One block of queries of one head.

    Args:
        edged: tiles with hidden pairs come first, too.
        has_low, has_high: there may be tiles wholly at an end of the tables.
    """
    if dropout is not None:
        dropout = Dropout(dropout.threshold, dropout.factor, tl.load(dropout.seed))
    blocks = tl.cdiv(x.length, block_x)
    # Later queries see more where keys are hidden ahead: they go first.
    x0 = (blocks - 1 - tl.program_id(0) % blocks) * block_x
    lane = tl.program_id(0) // blocks
    b = (lane // sizes.heads).to(tl.int64)
    h = lane % sizes.heads
    at = x0 + tl.arange(0, block_x)
    tokens, partners = load_side(x, b, h, at)
    term = None
    if x.term is not None:
        term = load_tokens(x.term, b, h, at, x.length)
    factor = None
    if x.factor is not None:
        factor = load_tokens(x.factor, b, h, at, x.length)
    rate = None
    if tables.curve is not None:
        rate = rates_of(tables.curve, b, at, x.length)
    x_tile = XTile(tokens, partners, None, term, factor, None, rate, None, None, x0, b, h, lane)
    begin, clear, near, far, edge, end = visible_tile_ranges(
        x, y, band, b, x0, causal, False, summary_block, block_x, block_y, block_x, block_y
    )
    near = clip(near, clear, edge)
    far = clip(far, near, edge)
    zeros = tl.zeros([block_x], tl.float32)
    state = _SoftmaxState(
        tl.zeros([block_x, y.second.block], tl.float32), zeros, zeros - float("inf"),
        zeros, zeros,
    )
    if edged:
        state = _walk(
            state, begin, clear, x_tile, None, x, y, tables, band, sizes, dropout, scale,
            NEAR, True, causal, precision, factor_precision, block_x, block_y,
        )
    if has_low:
        far_bias = far_numbers(x.term_low, tables, x_tile, at, x.length, False, block_x)
        state = _walk(
            state, clear, near, x_tile, far_bias, x, y, tables, band, sizes, dropout, scale,
            LOW, False, causal, precision, factor_precision, block_x, block_y,
        )
    state = _walk(
        state, near, far, x_tile, None, x, y, tables, band, sizes, dropout, scale,
        NEAR, False, causal, precision, factor_precision, block_x, block_y,
    )
    if has_high:
        far_bias = far_numbers(x.term_high, tables, x_tile, at, x.length, True, block_x)
        state = _walk(
            state, far, edge, x_tile, far_bias, x, y, tables, band, sizes, dropout, scale,
            HIGH, False, causal, precision, factor_precision, block_x, block_y,
        )
    state = _walk(
        state, edge, end, x_tile, None, x, y, tables, band, sizes, dropout, scale,
        NEAR, True, causal, precision, factor_precision, block_x, block_y,
    )
    result = state.output
    if tables.value is not None:
        if has_low:
            result += state.low[:, None] * load_row(tables.value, h, 0)[None, :]
        if has_high:
            result += state.high[:, None] * load_row(tables.value, h, tables.count - 1)[None, :]
    row_sum = state.row_sum
    row_max = state.row_max
    if x.sinks is not None:  # one more key, without a value
        sinks = load_numbers(start_of(x.sinks, b, h), at, x.length, float("-inf")) * LOG2E
        row_max = tl.maximum(row_max, sinks)
        finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        rescale = tl.exp2(state.row_max - finite_max)
        row_sum = row_sum * rescale + tl.exp2(sinks - finite_max)
        result *= rescale[:, None]
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    if dropout is not None:
        result *= dropout.factor
    result /= row_sum[:, None]
    store_tokens(output, b, h, result, at, x.length)
    row_lse = (row_max + tl.log2(row_sum)) / LOG2E
    tl.store(start_of(lse, b, h) + at, row_lse, mask=at < x.length)
