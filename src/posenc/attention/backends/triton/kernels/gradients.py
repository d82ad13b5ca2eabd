"""dQ and gradients of the query-side terms, or dK, dV and those of the key side if ``for_keys``.

Among the latter is DeBERTa's p2c: ``into.term`` of keys, a sum over tiles of ``rows_of_x``. The
gradients of its rows, by offset, are those of ``offsets_kernel``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Dropout, XTile
from posenc.attention.backends.triton.kernels.backward_tile import tile_ds
from posenc.attention.backends.triton.kernels.configs import TOKENS, fitting
from posenc.attention.backends.triton.kernels.curves import rate_gradients, rates_of
from posenc.attention.backends.triton.kernels.logits import (
    HIGH,
    LOW,
    NEAR,
    carried_before,
    far_numbers,
)
from posenc.attention.backends.triton.kernels.memory import (
    clip,
    load_numbers,
    load_row,
    load_tokens,
    product,
    start_of,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.rotary import load_side, store_gradients
from posenc.attention.backends.triton.kernels.visibility import visible_tile_ranges
from posenc.attention.backends.triton.kernels.windows import rows_of_x, window_start


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
def _walk(
    state,
    begin,
    end,
    low_end,
    high_begin,
    x_tile,
    far,
    second_far,
    x,
    y,
    tables,
    band,
    y_head,
    dropout,
    scale,
    kind: tl.constexpr,
    masked: tl.constexpr,
    has_low: tl.constexpr,
    has_high: tl.constexpr,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Tiles ``begin`` to ``end``, all of one kind.

    Of those with hidden pairs (``masked``), some may read one entry alone, too: those before
    ``low_end`` and from ``high_begin`` on.
    """
    tokens, partners = state.tokens, state.partners
    second, term = state.second, state.term
    factor, column = state.factor, state.column
    low, high = state.low, state.high
    weight_low, weight_high, rate = state.weight_low, state.weight_high, state.rate
    carried = tl.zeros([1, 1], tl.float32)
    if kind == NEAR:
        carried = carried_before(
            x_tile, tables, band, begin * block_y, True, precision, for_keys, block_x
        )
    for tile in range(begin, end):
        y0 = tile * block_y
        y_at = y0 + tl.arange(0, block_y)
        y_tokens, y_partners = load_side(y, x_tile.b, y_head, y_at)
        y_second = load_tokens(y.second, x_tile.b, y_head, y_at, y.length)
        y_factor = None
        if y.factor is not None:
            y_factor = load_tokens(y.factor, x_tile.b, x_tile.h, y_at, y.length)
        weights, ds, carried = tile_ds(
            x_tile, far, second_far, y_tokens, y_partners, y_second, y_factor, carried, x, y,
            tables, band, dropout, scale, y0, kind, masked, causal, for_keys, precision,
            factor_precision, block_x, block_y,
        )
        tokens += product(ds.to(y_tokens.dtype), y_tokens, precision)
        if x.rotary is not None:
            partners += product(ds.to(y_tokens.dtype), y_partners, precision)
        if for_keys:
            second += product(weights.to(y_second.dtype), y_second, precision)
        if x.factor is not None:
            factor += product(ds, y_factor, factor_precision)
        if x.column is not None:
            column += tl.sum(ds, 1)
        if tables.curve is not None and not for_keys:
            start = window_start(x_tile.start, y0, band.origin, block_x, for_keys)
            rate += rate_gradients(
                ds, x_tile.rate, tables.curve, x_tile.b, x_tile.h, x_tile.start, start,
                tables.count, block_x, block_y,
            )
        if kind == LOW:
            low += tl.sum(ds, 1)
            weight_low += tl.sum(weights, 1)
        elif kind == HIGH:
            high += tl.sum(ds, 1)
            weight_high += tl.sum(weights, 1)
        else:
            if masked and has_low:
                low += tl.where(tile < low_end, tl.sum(ds, 1), 0.0)
                weight_low += tl.where(tile < low_end, tl.sum(weights, 1), 0.0)
            if masked and has_high:
                high += tl.where(tile >= high_begin, tl.sum(ds, 1), 0.0)
                weight_high += tl.where(tile >= high_begin, tl.sum(weights, 1), 0.0)
            if tables.x is not None:
                if masked and has_low:
                    ds = tl.where(tile < low_end, 0.0, ds)
                if masked and has_high:
                    ds = tl.where(tile >= high_begin, 0.0, ds)
                start = window_start(x_tile.start, y0, band.origin, block_x, for_keys)
                term += rows_of_x(
                    ds, tables.x, x_tile.h, start, tables.count, precision, block_x, for_keys
                )
    return _GradientSums(
        tokens, partners, second, term, factor, column, low, high, weight_low, weight_high, rate
    )


@triton.autotune(
    configs=TOKENS, key=["key", "for_keys"], prune_configs_by={"early_config_prune": fitting}
)
@triton.jit(do_not_specialize=["key"])
def gradients_kernel(
    x,
    y,
    tables,
    band,
    sizes,
    dropout,
    into,
    scale,
    key,
    edged: tl.constexpr,
    has_low: tl.constexpr,
    has_high: tl.constexpr,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    summary_block: tl.constexpr,
    span: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """One block of x of one of its heads; keys meet all query heads that share them, one by one.

    Args:
        into: where the gradients go, ``Gradients``.
        edged: tiles with hidden pairs come first, too.
        has_low, has_high: there may be pairs beyond the ends of the tables.
        span: side of the squares of pairs of which ``Gradients.low`` and ``high`` sum up those
            that read one entry alone; ``offsets_kernel`` sums up the others. Divided by all tiles.
    """
    if dropout is not None:
        dropout = Dropout(dropout.threshold, dropout.factor, tl.load(dropout.seed))
    blocks = tl.cdiv(x.length, block_x)
    # Later queries see more, and earlier keys are seen more, where keys are hidden ahead.
    block = tl.program_id(0) % blocks
    if not for_keys:
        block = blocks - 1 - block
    x0 = block * block_x
    at = x0 + tl.arange(0, block_x)
    heads = sizes.heads
    members = 1
    if for_keys:
        heads = sizes.heads // sizes.group
        members = sizes.group
    lane = tl.program_id(0) // blocks
    b = (lane // heads).to(tl.int64)
    x_head = lane % heads
    tokens, partners = load_side(x, b, x_head, at)
    second = load_tokens(x.second, b, x_head, at, x.length)
    begin, clear, low_end, high_begin, edge, end = visible_tile_ranges(
        x, y, band, b, x0, causal, for_keys, summary_block, block_x, block_y, span, span
    )
    near = clip(low_end, clear, edge)
    far = clip(high_begin, near, edge)
    zeros = tl.zeros([block_x], tl.float32)
    dummy = tl.zeros([1], tl.float32)
    partner_sum = dummy
    if x.rotary is not None:
        token_sum = tl.zeros([block_x, x.rotary.block], tl.float32)
        partner_sum = tl.zeros([block_x, x.rotary.block], tl.float32)
    else:
        token_sum = tl.zeros([block_x, x.tokens.block], tl.float32)
    second_sum = dummy
    if for_keys:
        second_sum = tl.zeros([block_x, x.second.block], tl.float32)
    for member in range(members):
        h = x_head * members + member
        y_head = h
        if not for_keys:
            y_head = h // sizes.group
        term = None
        term_sum = dummy
        if x.term is not None:
            term = load_tokens(x.term, b, h, at, x.length)
            term_sum = tl.zeros([block_x, x.term.block], tl.float32)
        factor = None
        factor_sum = dummy
        if x.factor is not None:
            factor = load_tokens(x.factor, b, h, at, x.length)
            factor_sum = tl.zeros([block_x, x.factor.block], tl.float32)
        column = None
        if x.column is not None:
            column = load_numbers(start_of(x.column, b, h), at, x.length, 0.0)
        rate = None
        lse = None
        delta = None
        if not for_keys:
            lse = load_numbers(start_of(x.lse, b, h), at, x.length, float("inf"))
            delta = load_numbers(start_of(x.delta, b, h), at, x.length, 0.0)
            if tables.curve is not None:
                rate = rates_of(tables.curve, b, at, x.length)
        query_lane = (b * sizes.heads + h).to(tl.int32)
        x_tile = XTile(
            tokens, partners, second, term, factor, column, rate, lse, delta, x0, b, h, query_lane
        )
        state = _GradientSums(
            token_sum, partner_sum, second_sum, term_sum, factor_sum, zeros, zeros, zeros,
            zeros, zeros, zeros,
        )
        if edged:
            state = _walk(
                state, begin, clear, low_end, high_begin, x_tile, None, None, x, y, tables, band,
                y_head, dropout, scale, NEAR, True, has_low, has_high, causal, for_keys, precision,
                factor_precision, block_x, block_y,
            )
        if has_low:
            far_bias = far_numbers(x.term_low, tables, x_tile, at, x.length, for_keys, block_x)
            second_far = None
            if x.second_low is not None:
                second_far = load_numbers(start_of(x.second_low, b, h), at, x.length, 0.0)
            state = _walk(
                state, clear, near, low_end, high_begin, x_tile, far_bias, second_far, x, y, tables,
                band, y_head, dropout, scale, LOW, False, has_low, has_high, causal, for_keys,
                precision, factor_precision, block_x, block_y,
            )
        state = _walk(
            state, near, far, low_end, high_begin, x_tile, None, None, x, y, tables, band, y_head,
            dropout, scale, NEAR, False, has_low, has_high, causal, for_keys, precision,
            factor_precision, block_x, block_y,
        )
        if has_high:
            far_bias = far_numbers(x.term_high, tables, x_tile, at, x.length, not for_keys, block_x)
            second_far = None
            if x.second_high is not None:
                second_far = load_numbers(start_of(x.second_high, b, h), at, x.length, 0.0)
            state = _walk(
                state, far, edge, low_end, high_begin, x_tile, far_bias, second_far, x, y, tables,
                band, y_head, dropout, scale, HIGH, False, has_low, has_high, causal, for_keys,
                precision, factor_precision, block_x, block_y,
            )
        state = _walk(
            state, edge, end, low_end, high_begin, x_tile, None, None, x, y, tables, band, y_head,
            dropout, scale, NEAR, True, has_low, has_high, causal, for_keys, precision,
            factor_precision, block_x, block_y,
        )
        token_sum = state.tokens
        partner_sum = state.partners
        second_sum = state.second
        inside = at < x.length
        if x.term is not None:
            result = state.term
            if has_low:
                row = load_row(tables.x, h, tables.count - 1 if for_keys else 0)
                result += state.low[:, None] * row[None, :]
            if has_high:
                row = load_row(tables.x, h, 0 if for_keys else tables.count - 1)
                result += state.high[:, None] * row[None, :]
            store_tokens(into.term, b, h, result, at, x.length)
        if x.factor is not None:
            store_tokens(into.factor, b, h, state.factor, at, x.length)
        if x.column is not None:
            tl.store(start_of(into.column, b, h) + at, state.column, mask=inside)
        if into.low is not None:
            tl.store(start_of(into.low, b, h) + at, state.low, mask=inside)
            tl.store(start_of(into.high, b, h) + at, state.high, mask=inside)
        if into.rate is not None:
            tl.store(start_of(into.rate, b, h) + at, state.rate, mask=inside)
        if into.weight_low is not None:
            tl.store(start_of(into.weight_low, b, h) + at, state.weight_low, mask=inside)
            tl.store(start_of(into.weight_high, b, h) + at, state.weight_high, mask=inside)
    store_gradients(
        into.tokens, x.rotary, token_sum * scale, partner_sum * scale, b, x_head, at, x.length
    )
    if for_keys:
        store_tokens(into.second, b, x_head, second_sum, at, x.length)
