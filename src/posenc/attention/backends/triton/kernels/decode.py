"""One query a row against many keys (split-k): partial softmax of splits, then their combination.

The query heads that share a key head are the rows of one tile, so that keys are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.configs import DECODE
from posenc.attention.backends.triton.kernels.logits import capped, softmax_step
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    load_tokens,
    load_vectors,
    product,
    start_of,
)
from posenc.attention.backends.triton.kernels.rotary import load_rotated


@triton.autotune(configs=DECODE, key=["key"])
@triton.jit(do_not_specialize=["key"])
def split_kernel(
    q,
    k,
    v,
    bias,
    bucket,
    value_rows,
    query_rotary,
    key_rotary,
    partial_ptr,
    partial_lse_ptr,
    keys,
    splits,
    key_heads,
    sharing,
    scale,
    softcap,
    key,
    ratio: tl.constexpr,
    rows: tl.constexpr,
    precision: tl.constexpr,
    block: tl.constexpr,
):
    """Attention of ``ratio`` query heads over one split of the keys.

    Args:
        q: ``[B, H, 1, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``.
        bias: ``[B, H, K]``, -inf where hidden, or None.
        bucket: ``[B, 1, K]``, the row of ``value_rows`` (``[h, N, E]``) that each key adds.
        query_rotary, key_rotary: factors of their pairs of features, or None.
        partial_ptr: ``[B, H, splits, E]``; partial_lse_ptr: ``[B, H, splits]``.
        key_heads: programs a batch row and split; ``sharing`` of them read the same key head.
        rows: ``ratio`` rounded up to what a product of matrices needs.
    """
    split = tl.program_id(0) % splits
    lane = tl.program_id(0) // splits
    b = (lane // key_heads).to(tl.int64)
    group = lane % key_heads
    g = group // sharing
    row = tl.arange(0, rows)
    h = group * ratio + row
    last_head = (group + 1) * ratio
    inside = h < last_head
    # [rows, D]: the one query of each head, read as if heads were tokens.
    if query_rotary is None:
        queries = load_vectors(q.pointer + b * q.row, q.head, h, inside, q.width, q.block)
        partners = queries
    else:
        queries, partners = load_rotated(
            q.pointer + b * q.row, q.head, q.width, query_rotary,
            query_rotary.pointer + b * query_rotary.row, query_rotary.head, h, inside,
        )
    keys_per_split = tl.cdiv(tl.cdiv(keys, splits), block) * block
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, keys)
    output = tl.zeros([rows, v.block], tl.float32)
    row_sum = tl.zeros([rows], tl.float32)
    row_max = row_sum - float("inf")  # [rows]
    for start in range(first, last, block):
        at = start + tl.arange(0, block)
        if key_rotary is None:
            tokens = load_tokens(k, b, g, at, keys)
            logits = product(queries, tl.trans(tokens), precision) * scale
        else:
            tokens, others = load_rotated(
                start_of(k, b, g), k.step, k.width, key_rotary,
                start_of(key_rotary, b, g), key_rotary.step, at, at < keys,
            )
            logits = product(queries, tl.trans(tokens), precision)
            logits += product(partners, tl.trans(others), precision)
            logits *= scale
        valid = (at < keys)[None, :]
        if bias is not None:
            bias_rows = bias.pointer + b * bias.row + h.to(tl.int64)[:, None] * bias.head
            added = tl.load(bias_rows + at[None, :], mask=inside[:, None] & valid, other=0.0)
            logits += added
        if softcap is not None:
            logits = capped(logits, softcap)
            if bias is not None:
                logits = tl.where(added == float("-inf"), float("-inf"), logits)
        logits = tl.where(valid, logits * LOG2E, float("-inf"))
        weights, rescale, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        values = load_tokens(v, b, g, at, keys)  # [block, E]
        output = output * rescale[:, None] + product(weights.to(values.dtype), values, precision)
        if value_rows is not None:
            entry = tl.load(bucket.pointer + b * bucket.row + at, mask=at < keys, other=0)
            feature = tl.arange(0, value_rows.block)
            table = value_rows.pointer + group.to(tl.int64) * value_rows.head
            pointers = table + entry.to(tl.int64)[:, None] * value_rows.width + feature[None, :]
            more = tl.load(pointers, mask=(feature < value_rows.width)[None, :], other=0.0)
            output += product(weights.to(more.dtype), more, precision)
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    output /= row_sum[:, None]
    heads = key_heads * ratio
    partial_at = (b * heads + h) * splits + split
    feature = tl.arange(0, v.block)
    partial = partial_ptr + partial_at[:, None] * v.width + feature[None, :]
    tl.store(partial, output, mask=inside[:, None] & (feature < v.width)[None, :])
    tl.store(partial_lse_ptr + partial_at, row_max + tl.log2(row_sum), mask=inside)


@triton.jit
def combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    splits,
    most: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
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
