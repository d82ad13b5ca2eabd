"""Logits of one tile.

Pairs read entry ``n = clip(t, 0, count - 1)`` of everything that depends on the offset, with t as
in ``Band``; entry ``clip(-t, …)`` where ``for_keys``. A tile wholly at or beyond the first or last
entry reads just that one, and one number a token is all that is added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.curves import rates_of, with_curve
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    load_numbers,
    load_tokens,
    product,
    start_of,
)
from posenc.attention.backends.triton.kernels.visibility import visible
from posenc.attention.backends.triton.kernels.windows import (
    half_of_x,
    unroll_x,
    window_of_biases,
    window_of_x,
    window_of_y,
    window_start,
)

# Kinds of tiles: pairs read several entries; the first alone; the last alone.
NEAR = tl.constexpr(0)
LOW = tl.constexpr(1)
HIGH = tl.constexpr(2)


@triton.jit
def far_numbers(numbers, tables, x_tile, at, length, last: tl.constexpr, block: tl.constexpr):
    """Bias ``[x]`` of tokens of x in LOW tiles, or in HIGH ones if ``last``."""
    bias = tl.zeros([block], tl.float32)
    if numbers is not None:
        bias += load_numbers(start_of(numbers, x_tile.b, x_tile.h), at, length, 0.0)
    if tables.bias_by_offset is not None:
        biases = tables.bias_by_offset + x_tile.h.to(tl.int64) * tables.bias_head
        bias += tl.load(biases + (tables.count - 1 if last else 0))
    return bias


@triton.jit
def carried_before(
    x_tile,
    tables,
    band,
    y0,
    unscaled: tl.constexpr,
    precision: tl.constexpr,
    for_keys: tl.constexpr,
    block: tl.constexpr,
):
    """``carried`` of ``tile_logits`` for a tile at ``y0`` that has none before it: ``[x, half]``.

    Gradients with two tables have no registers to carry it in: products are computed twice.
    """
    carried = tl.zeros([1, 1], tl.float32)
    if tables.x is not None and not (unscaled and tables.y is not None):
        start = window_start(x_tile.start, y0, band.origin, block, for_keys)
        if for_keys:
            start += block
        carried = half_of_x(x_tile.term, tables.x, x_tile.h, start, tables.count, precision, block)
    return carried


@triton.jit
def _product(
    x_tile, y_tokens, y_partners, rotated: tl.constexpr, precision: tl.constexpr, start=None
):
    """Products ``[x, y]`` of queries and keys, added to ``start``."""
    products = product(x_tile.tokens, tl.trans(y_tokens), precision, start)
    if rotated:
        products = product(x_tile.partners, tl.trans(y_partners), precision, products)
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
    x_tile,
    far,
    y_tokens,
    y_partners,
    y_factor,
    carried,
    x,
    y,
    tables,
    band,
    scale,
    y0,
    kind: tl.constexpr,
    masked: tl.constexpr,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    unscaled: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Logits ``[x, y]`` of one tile, -inf where hidden, without what each token of x adds.

    That is ``far_numbers`` and its column, but under a cap, which takes whole logits. They are to
    the base of 2, or divided by the scale if ``unscaled``: the sums of products then start with all
    else, one addition less a pair. The forward pass, which needs their maximum, would gain less by
    it than it has to move.

    Args:
        x_tile: the tile of x; far: its numbers where the tile reads one entry.
        y_tokens, y_partners, y_factor: of the tile.
        carried: products of x with the half of the window that it shares with the tile before.

    Returns those with the half that it shares with the next tile, too.
    """
    queries: tl.constexpr = block_y if for_keys else block_x
    y_at = y0 + tl.arange(0, block_y)
    logits = None  # [x, y]
    unit = LOG2E
    if unscaled:
        unit = 1 / scale
    else:
        logits = _product(x_tile, y_tokens, y_partners, x.rotary is not None, precision)
        logits *= scale * LOG2E
    if x.factor is not None:
        products = product(x_tile.factor, tl.trans(y_factor), factor_precision)
        logits = _added(logits, products * unit)
    if kind == NEAR:
        start = window_start(x_tile.start, y0, band.origin, queries, for_keys)
        if tables.bias_by_offset is not None:
            biases = tables.bias_by_offset + x_tile.h.to(tl.int64) * tables.bias_head
            # Keys' gradients have as many copies either way, and no registers left.
            twice: tl.constexpr = unscaled and not for_keys
            biases = window_of_biases(
                biases, unit, start, tables.count, block_x, block_y, for_keys, twice
            )
            logits = _added(logits, biases)
        if tables.x is not None:
            tl.static_assert(block_x == block_y)
            if unscaled and tables.y is not None:
                products = window_of_x(
                    x_tile.term, tables.x, x_tile.h, start, tables.count, precision, block_x,
                    for_keys
                )
            else:
                fresh = half_of_x(
                    x_tile.term,
                    tables.x,
                    x_tile.h,
                    start if for_keys else start + block_x,
                    tables.count,
                    precision,
                    block_x,
                )
                if for_keys:
                    products = unroll_x(fresh, carried, block_x, for_keys)
                else:
                    products = unroll_x(carried, fresh, block_x, for_keys)
                carried = fresh  # the windows of neighbouring tiles overlap by half
            logits = _added(logits, products * unit)
        if tables.y is not None:
            tl.static_assert(block_x == block_y)
            y_term = load_tokens(y.term, x_tile.b, x_tile.h, y_at, y.length)
            products = window_of_y(
                y_term, tables.y, x_tile.h, start, tables.count, precision, block_x, for_keys
            )
            logits = _added(logits, products * unit)
    elif tables.y is not None:
        numbers = y.term_low if kind == LOW else y.term_high
        numbers = load_numbers(start_of(numbers, x_tile.b, x_tile.h), y_at, y.length, 0.0)
        logits = _added(logits, tl.broadcast_to((numbers * unit)[None, :], [block_x, block_y]))
    if y.column is not None:
        column = load_numbers(start_of(y.column, x_tile.b, x_tile.h), y_at, y.length, 0.0)
        logits = _added(logits, tl.broadcast_to((column * unit)[None, :], [block_x, block_y]))
    if unscaled:
        logits = _product(x_tile, y_tokens, y_partners, x.rotary is not None, precision, logits)
    if tables.curve is not None:
        rate = x_tile.rate
        if for_keys:
            rate = rates_of(tables.curve, x_tile.b, y_at, y.length)
        start = window_start(x_tile.start, y0, band.origin, queries, for_keys)
        logits = with_curve(
            logits, tables.curve, rate, x_tile.b, x_tile.h, unit, y0 if for_keys else x_tile.start,
            start, tables.count, block_x, block_y, for_keys,
        )
    if tables.softcap is not None:
        if kind != NEAR:
            logits += (far * unit)[:, None]
        if x.column is not None:
            logits += (x_tile.column * unit)[:, None]
        logits = capped(logits, tables.softcap * unit)
    if masked:
        x_at = x_tile.start + tl.arange(0, block_x)
        t = y_at[None, :] - x_at[:, None] + band.origin  # [x, y]
        shown = visible(t, x, y, band, x_tile.b, x_at, y_at, causal, for_keys)
        logits = tl.where(shown, logits, float("-inf"))
    return logits, carried


@triton.jit
def philox(seed, first, second, third):
    """Four random words of 32 bits for each counter ``(first, second, third, 0)``.

    Philox-4x32 of Salmon et al. (2011), in the seven rounds that are the fewest to pass all of
    their tests. Triton's own computes both halves of a product apart.
    """
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = first.to(tl.uint32)
    b = second.to(tl.uint32)
    c = third.to(tl.uint32)
    d = tl.zeros_like(a)
    for _ in tl.static_range(7):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ key_low
        b = right.to(tl.uint32)
        c = (left >> 32).to(tl.uint32) ^ d ^ key_high
        d = left.to(tl.uint32)
        key_low = tl.add(key_low, 0x9E3779B9, sanitize_overflow=False)
        key_high = tl.add(key_high, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def undropped(
    dropout, lane, x0, y0, block_x: tl.constexpr, block_y: tl.constexpr, for_keys: tl.constexpr
):
    """Mask ``[x, y]`` of the pairs that dropout keeps: the same for a pair in whatever tile it is.

    One draw of 128 bits serves eight pairs, of the queries i and i + 8 and the keys j, j + 1,
    j + 8 and j + 9: those that a thread holds of the logits.
    """
    keys: tl.constexpr = block_x if for_keys else block_y
    queries: tl.constexpr = block_y if for_keys else block_x
    key_start = x0 if for_keys else y0
    query_start = y0 if for_keys else x0
    query = tl.arange(0, queries // 2)
    query = query_start + query // 8 * 16 + query % 8
    key = tl.arange(0, keys // 4)
    key = key_start + key // 4 * 16 + key % 4 * 2
    if for_keys:
        zero = tl.zeros([keys // 4, queries // 2], tl.int32)
        query = query[None, :] + zero
        key = key[:, None] + zero
    else:
        zero = tl.zeros([queries // 2, keys // 4], tl.int32)
        query = query[:, None] + zero
        key = key[None, :] + zero
    a, b, c, d = philox(dropout.seed, key, query, lane + zero)
    words = tl.join(tl.join(a, b), tl.join(c, d))  # keys one apart, then queries eight apart
    bits = tl.join(words << 16, words)  # keys eight apart: the upper 16 bits of each
    if for_keys:
        bits = tl.reshape(bits, [keys // 16, 4, queries // 16, 8, 2, 2, 2])
        bits = tl.permute(bits, (0, 6, 1, 4, 2, 5, 3))
    else:
        bits = tl.reshape(bits, [queries // 16, 8, keys // 16, 4, 2, 2, 2])
        bits = tl.permute(bits, (0, 5, 1, 2, 6, 3, 4))
    return tl.reshape(bits, [block_x, block_y]) >= dropout.threshold.to(tl.uint32)
