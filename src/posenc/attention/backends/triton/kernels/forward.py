"""Attention by online softmax, the output and its log-sum-exp (lse), of blocks of queries.

Of one query a row, against many keys, by partial softmax of splits and then their combination
(split-k): the query heads that share a key head are the rows of one tile, so that keys are read
once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.configs import DECODE, FORWARD, fitting
from posenc.attention.backends.triton.kernels.logits import (
    LOW,
    NEAR,
    capped,
    query_tile,
    softmax_step,
    tile_logits,
    walk,
)
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    load_numbers,
    load_rotated,
    load_row,
    load_rows,
    load_side,
    load_tokens,
    load_vectors,
    product,
    store_numbers,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.visibility import undropped, visible_tile_ranges
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
def _attend_tile(
    args, state, tile, other, far, carried, ranges, kind: tl.constexpr, masked: tl.constexpr
):
    """The sums with those of a tile of keys."""
    low = state.low
    high = state.high
    logits, carried = tile_logits(args, tile, other, far, carried, kind, masked, False)
    if kind != NEAR and args.tables.softcap is None:
        logits += (far.bias * LOG2E)[:, None]
    weights, rescale, row_max, row_sum = softmax_step(logits, state.row_max, state.row_sum)
    if args.dropout is not None:
        keep = undropped(args, tile, other.start, other.at.shape[0])
        weights = tl.where(keep, weights, 0.0)
    v = load_tokens(args.y.second, tile.b, other.head, other.at, args.y.length)  # [y, E]
    output = state.output * rescale[:, None] + product(weights.to(v.dtype), v, args.precision)
    if args.tables.value_rows is not None:
        low *= rescale
        high *= rescale
        if kind == NEAR:
            start = window_start(args, tile.start, other.start, tile.at.shape[0])
            output += rows_of_x(args, weights, args.tables.value_rows, tile.h, start)
        elif kind == LOW:
            low += tl.sum(weights, 1)
        else:
            high += tl.sum(weights, 1)
    return _SoftmaxState(output, row_sum, row_max, low, high), carried


@triton.autotune(configs=FORWARD, key=["key"], prune_configs_by={"early_config_prune": fitting})
@triton.jit(do_not_specialize=["key"])
def forward_kernel(args, output, lse, key, block_x: tl.constexpr, block_y: tl.constexpr):
    """One block of queries of one head."""
    tile = query_tile(args, block_x)
    b, h = tile.b, tile.h
    ranges = visible_tile_ranges(args, b, tile.start, block_x, block_y)
    zeros = tl.zeros([block_x], tl.float32)
    result = tl.zeros([block_x, args.y.second.block], tl.float32)
    state = _SoftmaxState(result, zeros, zeros - float("inf"), zeros, zeros)
    state = walk(_attend_tile, args, state, tile, h // args.group, ranges, False, block_y)
    result = state.output
    if args.tables.value_rows is not None:
        if args.has_low:
            result += state.low[:, None] * load_row(args.tables.value_rows, h, 0)[None, :]
        if args.has_high:
            row = load_row(args.tables.value_rows, h, args.tables.count - 1)
            result += state.high[:, None] * row[None, :]
    row_sum = state.row_sum
    row_max = state.row_max
    if args.x.sinks is not None:  # one more key, without a value
        sinks = load_numbers(args.x.sinks, b, h, tile.at, args.x.length, float("-inf")) * LOG2E
        row_max = tl.maximum(row_max, sinks)
        finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        rescale = tl.exp2(state.row_max - finite_max)
        row_sum = row_sum * rescale + tl.exp2(sinks - finite_max)
        result *= rescale[:, None]
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    if args.dropout is not None:
        result *= args.dropout.factor
    result /= row_sum[:, None]
    store_tokens(output, b, h, result, tile.at, args.x.length)
    row_lse = (row_max + tl.log2(row_sum)) / LOG2E
    store_numbers(lse, b, h, row_lse, tile.at, args.x.length)


@triton.autotune(configs=DECODE, key=["key"])
@triton.jit(do_not_specialize=["key"])
def split_kernel(
    args, bucket, partial_ptr, partial_lse_ptr, splits, key, ratio: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr,
):
    """Attention of ``ratio`` query heads over one split of the keys.

    Args:
        args: columns are by query head, -inf where hidden; ``value_rows`` are by bucket.
        bucket: ``[B, 1, K]``, the row of values that each key adds.
        partial_ptr: ``[B, H, splits, E]``; partial_lse_ptr: ``[B, H, splits]``.
        ratio: query heads of a program, which share a key head; rows: it rounded up to what a
            product of matrices needs.
    """
    groups = args.heads // ratio
    split = tl.program_id(0) % splits
    lane = tl.program_id(0) // splits
    b = (lane // groups).to(tl.int64)
    group = lane % groups
    g = group // (args.group // ratio)
    h = group * ratio + tl.arange(0, rows)
    inside = h < (group + 1) * ratio
    # [rows, D]: the one query of each head, read as if heads were tokens.
    row = args.x.tokens.pointer + b * args.x.tokens.row
    if args.x.rotary is None:
        queries = load_vectors(
            row, args.x.tokens.head, h, inside, args.x.tokens.width, args.x.tokens.block
        )
        partners = queries
    else:
        queries, partners = load_rotated(
            row, args.x.tokens.head, args.x.tokens.width, args.x.rotary,
            args.x.rotary.pointer + b * args.x.rotary.row, args.x.rotary.head, h, inside,
        )
    keys_per_split = tl.cdiv(tl.cdiv(args.y.length, splits), block) * block
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, args.y.length)
    output = tl.zeros([rows, args.y.second.block], tl.float32)
    row_sum = tl.zeros([rows], tl.float32)
    row_max = row_sum - float("inf")  # [rows]
    for start in range(first, last, block):
        at = start + tl.arange(0, block)
        tokens, others = load_side(args.y, b, g, at)
        logits = product(queries, tl.trans(tokens), args.precision)
        if args.y.rotary is not None:
            logits += product(partners, tl.trans(others), args.precision)
        logits *= args.scale
        valid = (at < args.y.length)[None, :]
        if args.y.column is not None:
            bias = args.y.column.pointer + b * args.y.column.row + at[None, :]
            bias += h.to(tl.int64)[:, None] * args.y.column.head
            added = tl.load(bias, mask=inside[:, None] & valid, other=0.0)
            logits += added
        if args.tables.softcap is not None:
            logits = capped(logits, args.tables.softcap)
            if args.y.column is not None:
                logits = tl.where(added == float("-inf"), float("-inf"), logits)
        logits = tl.where(valid, logits * LOG2E, float("-inf"))
        weights, rescale, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        values = load_tokens(args.y.second, b, g, at, args.y.length)  # [block, E]
        products = product(weights.to(values.dtype), values, args.precision)
        output = output * rescale[:, None] + products
        if args.tables.value_rows is not None:
            entry = tl.load(bucket.pointer + b * bucket.row + at, mask=at < args.y.length, other=0)
            more = load_rows(args.tables.value_rows, group, entry, at < args.y.length)
            output += product(weights.to(more.dtype), more, args.precision)
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    output /= row_sum[:, None]
    partial_at = (b * args.heads + h) * splits + split
    feature = tl.arange(0, args.y.second.block)
    partial = partial_ptr + partial_at[:, None] * args.y.second.width + feature[None, :]
    tl.store(partial, output, mask=inside[:, None] & (feature < args.y.second.width)[None, :])
    tl.store(partial_lse_ptr + partial_at, row_max + tl.log2(row_sum), mask=inside)


@triton.jit
def combine_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, splits, most: tl.constexpr, rows: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr,
):
    """The splits of one head ``[splits, width]``, weighted by their LSE (to the base of 2);
    stores their LSE, too. ``most`` is ``splits`` rounded up to a power of two, ``rows`` how many
    are read at once."""
    lane = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, block)
    inside = feature < width
    split = tl.arange(0, most)
    all_lse = tl.load(
        partial_lse_ptr + lane * splits + split, mask=split < splits, other=float("-inf")
    )
    row_max = tl.max(all_lse, 0)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.exp2(all_lse - row_max), 0)
    output = tl.zeros([rows, block], tl.float32)
    for start in range(0, splits, rows):
        split = start + tl.arange(0, rows)
        partial_at = lane * splits + split
        split_lse = tl.load(partial_lse_ptr + partial_at, mask=split < splits, other=float("-inf"))
        mask = (split < splits)[:, None] & inside[None, :]
        partial = tl.load(
            partial_ptr + partial_at[:, None] * width + feature[None, :], mask, other=0.0
        )
        output += partial * tl.exp2(split_lse - row_max)[:, None]
    valid = row_sum > 0
    row_sum = tl.where(valid, row_sum, 1.0)
    lse = tl.where(valid, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse_ptr + lane, lse / LOG2E)
    result = tl.sum(output, 0) / row_sum
    tl.store(out_ptr + lane * width + feature, result.to(out_ptr.dtype.element_ty), mask=inside)
