"""Gradients of tables by offset, one diagonal of square tiles a program.

All tiles of a diagonal meet the same window of entries, so that a program sums over batch rows and
tiles in its registers, and no two programs write to the same memory. Neighbouring windows overlap;
they are added afterwards. Squares of pairs that read one entry alone are left out where
``gradients_kernel`` has summed them up already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Dropout, XTile
from posenc.attention.backends.triton.kernels.backward_tile import tile_ds
from posenc.attention.backends.triton.kernels.configs import OFFSETS, all_or_first
from posenc.attention.backends.triton.kernels.curves import piece_gradients, rates_of
from posenc.attention.backends.triton.kernels.logits import NEAR, carried_before
from posenc.attention.backends.triton.kernels.memory import (
    load_numbers,
    load_tokens,
    product,
    start_of,
)
from posenc.attention.backends.triton.kernels.rotary import load_side
from posenc.attention.backends.triton.kernels.visibility import has_visible_pairs
from posenc.attention.backends.triton.kernels.windows import roll_x, roll_y, window_start


@triton.autotune(
    configs=OFFSETS, key=["key"], prune_configs_by={"early_config_prune": all_or_first}
)
@triton.jit(do_not_specialize=["key"])
def offsets_kernel(
    x,
    y,
    tables,
    band,
    sizes,
    dropout,
    bias_ptr,
    rows_ptr,
    of_curve,
    first_diagonal,
    diagonals,
    low_steps,
    high_steps,
    out_heads,
    splits,
    scale,
    width: tl.constexpr,
    key,
    of_values: tl.constexpr,
    has_low: tl.constexpr,
    has_high: tl.constexpr,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    summary_block: tl.constexpr,
    span: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block: tl.constexpr,
):
    """Sums over a share of the tiles of one diagonal, of one head or of all.

    Args:
        bias_ptr: ``[splits, out_heads, diagonals, 2 * block]``.
        rows_ptr: ``[splits, out_heads, diagonals, 2 * block, width]``; of the term of y, or,
            where ``of_values``, of the values, whose tokens are the gradients of the outputs.
        of_curve: ``CurveGradients`` if wanted; the gradients of its numbers then go to
            ``bias_ptr``.
        first_diagonal: number of the first, counted in tiles of y less tiles of x.
        low_steps, high_steps: squares of ``span`` by ``span`` pairs that are at most, and at least,
            so many apart are summed up by ``gradients_kernel``, where ``has_low``, ``has_high``.
        out_heads: H, or 1 to sum over the heads.
    """
    if dropout is not None:
        dropout = Dropout(dropout.threshold, dropout.factor, tl.load(dropout.seed))
    diagonal_index = tl.program_id(0) % diagonals
    head = tl.program_id(0) // diagonals % out_heads
    split = tl.program_id(0) // (diagonals * out_heads)
    diagonal = first_diagonal + diagonal_index
    x_tiles = tl.cdiv(x.length, block)
    y_tiles = tl.cdiv(y.length, block)
    begin = tl.maximum(-diagonal, 0)
    tiles = tl.maximum(tl.minimum(x_tiles, y_tiles - diagonal) - begin, 0)
    heads_summed = sizes.heads // out_heads
    items = sizes.batch * heads_summed * tiles
    items_per_split = tl.cdiv(items, splits)
    tiles_per_span: tl.constexpr = span // block
    bias_sum = tl.zeros([1, 1], tl.float32)
    if bias_ptr is not None:
        bias_sum = tl.zeros([block, block], tl.float32)
    slope_sum = tl.zeros([1], tl.float32)
    intercept_sum = tl.zeros([1], tl.float32)
    if of_curve is not None:
        slope_sum = tl.zeros([2 * tables.curve.block], tl.float32)
        intercept_sum = tl.zeros([2 * tables.curve.block], tl.float32)
    rows_sum = tl.zeros([1, 1], tl.float32)
    if rows_ptr is not None:
        row_block: tl.constexpr = y.second.block if of_values else y.term.block
        rows_sum = tl.zeros([2 * block, row_block], tl.float32)
    for item in range(split * items_per_split, tl.minimum((split + 1) * items_per_split, items)):
        tile = begin + item % tiles
        b = (item // tiles // heads_summed).to(tl.int64)
        h = head * heads_summed + item // tiles % heads_summed
        g = h // sizes.group
        x_head = h
        y_head = g
        if for_keys:
            x_head = g
            y_head = h
        x0 = tile * block
        y0 = (tile + diagonal) * block
        x_at = x0 + tl.arange(0, block)
        y_at = y0 + tl.arange(0, block)
        has_pairs = True
        if x.segment_ids is not None:
            has_pairs = has_visible_pairs(
                x, y, band, b, x0, y0, causal, for_keys, summary_block, block, block
            )
        if has_pairs:
            tokens, partners = load_side(x, b, x_head, x_at)
            second = load_tokens(x.second, b, x_head, x_at, x.length)
            term = None
            if x.term is not None:
                term = load_tokens(x.term, b, h, x_at, x.length)
            x_factor = None
            y_factor = None
            if x.factor is not None:
                x_factor = load_tokens(x.factor, b, h, x_at, x.length)
                y_factor = load_tokens(y.factor, b, h, y_at, y.length)
            column = None
            if x.column is not None:
                column = load_numbers(start_of(x.column, b, h), x_at, x.length, 0.0)
            rate = None
            lse = None
            delta = None
            if not for_keys:
                lse = load_numbers(start_of(x.lse, b, h), x_at, x.length, float("inf"))
                delta = load_numbers(start_of(x.delta, b, h), x_at, x.length, 0.0)
                if tables.curve is not None:
                    rate = rates_of(tables.curve, b, x_at, x.length)
            lane = (b * sizes.heads + h).to(tl.int32)
            y_tokens, y_partners = load_side(y, b, y_head, y_at)
            y_second = load_tokens(y.second, b, y_head, y_at, y.length)
            x_tile = XTile(
                tokens, partners, second, term, x_factor, column, rate, lse, delta, x0, b, h, lane
            )
            carried = carried_before(x_tile, tables, band, y0, True, precision, for_keys, block)
            weights, ds, _ = tile_ds(
                x_tile, None, None, y_tokens, y_partners, y_second, y_factor, carried, x, y, tables,
                band, dropout, scale, y0, NEAR, True, causal, for_keys, precision, factor_precision,
                block, block,
            )
            summand = weights if of_values else ds  # [x, y]
            summand = tl.where((x_at < x.length)[:, None], summand, 0.0)
            if tiles_per_span > 1:
                # Tiles of a diagonal lie in squares whose distances differ by one.
                steps = (tile + diagonal) // tiles_per_span - tile // tiles_per_span
                if has_low:
                    summand = tl.where(steps <= low_steps, 0.0, summand)
                if has_high:
                    summand = tl.where(steps >= high_steps, 0.0, summand)
            if of_curve is not None:
                start = window_start(x0, y0, band.origin, block, for_keys)
                bias_sum, slope_sum, intercept_sum = piece_gradients(
                    bias_sum, slope_sum, intercept_sum, summand, rate, tables.curve, b, h, x0,
                    start, tables.count, block, block,
                )
            elif bias_ptr is not None:
                bias_sum += summand
            if rows_ptr is not None:
                vectors = y_second
                if not of_values:
                    vectors = load_tokens(y.term, b, h, y_at, y.length)
                rolled = roll_y(summand.to(vectors.dtype), block, for_keys)
                rows_sum += product(rolled, vectors, precision)
    entry = tl.arange(0, 2 * block)
    entries_at = ((split * out_heads + head).to(tl.int64) * diagonals + diagonal_index) * (
        2 * block
    ) + entry
    if of_curve is not None:
        pieces_at = tl.program_id(0).to(tl.int64) * 2 * tables.curve.block
        pieces_at += tl.arange(0, 2 * tables.curve.block)
        tl.store(of_curve.slope + pieces_at, slope_sum)
        tl.store(of_curve.intercept + pieces_at, intercept_sum)
    if bias_ptr is not None:
        tl.store(bias_ptr + entries_at, tl.sum(roll_x(bias_sum, block, for_keys), 0))
    if rows_ptr is not None:
        column_at = tl.arange(0, row_block)
        rows = rows_ptr + entries_at[:, None] * width + column_at[None, :]
        tl.store(rows, rows_sum, mask=(column_at < width)[None, :])
