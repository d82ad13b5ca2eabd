"""One query a row against many keys: shares of the keys side by side, then put together.

The query heads that share a key head are the rows of one tile, so that keys are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Tokens, Turn
from posenc.attention.backends.triton.kernels.configs import DECODE
from posenc.attention.backends.triton.kernels.logits import LOG2E
from posenc.attention.backends.triton.kernels.memory import load_tokens, located, product
from posenc.attention.backends.triton.kernels.turning import load_turned, located_turn


@triton.jit
def _of_row(q, b):
    """The one query of each head of a batch row, located as if heads were tokens."""
    return Tokens(q.pointer + b * q.row, q.row, q.head, q.head, q.width, q.block)


@triton.jit
def _turn_of_row(turn, b):
    """Its factors, likewise."""
    pointer = turn.pointer + b * turn.row
    return Turn(
        pointer, turn.row, turn.head, turn.head, turn.pairs, turn.half, turn.block, turn.adjacent
    )


@triton.autotune(configs=DECODE, key=["key"])
@triton.jit
def share_kernel(
    q,
    k,
    v,
    bias,
    bucket,
    value_rows,
    query_turn,
    key_turn,
    partial_ptr,
    total_ptr,
    keys,
    shares,
    key_heads,
    sharing,
    scale,
    key: tl.constexpr,
    ratio: tl.constexpr,
    rows: tl.constexpr,
    precision: tl.constexpr,
    block: tl.constexpr,
):
    """Attention of ``ratio`` query heads over one share of the keys.

    Args:
        q: ``[B, H, 1, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``.
        bias: ``[B, H, K]``, or None.
        bucket: ``[B, 1, K]``, the row of ``value_rows`` (``[h, N, E]``) that each key adds.
        query_turn, key_turn: factors of their pairs of features, or None.
        partial_ptr: ``[B, H, shares, E]``; total_ptr: ``[B, H, shares]``.
        key_heads: programs a batch row and share; ``sharing`` of them read the same key head.
        rows: ``ratio`` rounded up to what a product of matrices needs.
    """
    share = tl.program_id(0) % shares
    lane = tl.program_id(0) // shares
    b = (lane // key_heads).to(tl.int64)
    group = lane % key_heads
    g = group // sharing
    row = tl.arange(0, rows)
    h = group * ratio + row
    last_head = (group + 1) * ratio
    inside = h < last_head
    if query_turn is None:
        own = load_tokens(_of_row(q, b), h, last_head)
        partners = None
    else:
        own, partners = load_turned(_of_row(q, b), _turn_of_row(query_turn, b), h, inside)
    each = tl.cdiv(tl.cdiv(keys, shares), block) * block
    first = share * each
    last = tl.minimum(first + each, keys)
    output = tl.zeros([rows, v.block], tl.float32)
    weight = tl.zeros([rows], tl.float32)
    peak = weight - float("inf")
    for start in range(first, last, block):
        at = start + tl.arange(0, block)
        if key_turn is None:
            tokens = load_tokens(located(k, b, g), at, keys)
            logits = product(own, tl.trans(tokens), precision) * scale
        else:
            # fmt: off
            tokens, others = load_turned(
                located(k, b, g), located_turn(key_turn, b, g), at, at < keys
            )
            # fmt: on
            logits = product(own, tl.trans(tokens), precision)
            logits += product(partners, tl.trans(others), precision)
            logits *= scale
        seen = (at < keys)[None, :]
        if bias is not None:
            numbers = bias.pointer + b * bias.row + h.to(tl.int64)[:, None] * bias.head
            logits += tl.load(numbers + at[None, :], mask=inside[:, None] & seen, other=0.0)
        logits = tl.where(seen, logits * LOG2E, float("-inf"))
        above = tl.maximum(peak, tl.max(logits, 1))
        finite = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(logits - finite[:, None])
        shrink = tl.exp2(peak - finite)
        peak = above
        weight = weight * shrink + tl.sum(weights, 1)
        values = load_tokens(located(v, b, g), at, keys)
        output = output * shrink[:, None] + product(weights.to(values.dtype), values, precision)
        if value_rows is not None:
            number = tl.load(bucket.pointer + b * bucket.row + at, mask=at < keys, other=0)
            feature = tl.arange(0, value_rows.block)
            table = value_rows.pointer + group.to(tl.int64) * value_rows.head
            pointers = table + number.to(tl.int64)[:, None] * value_rows.width + feature[None, :]
            added = tl.load(pointers, mask=(feature < value_rows.width)[None, :], other=0.0)
            output += product(weights.to(added.dtype), added, precision)
    weight = tl.where(weight > 0, weight, 1.0)
    output /= weight[:, None]
    heads = key_heads * ratio
    place = (b * heads + h) * shares + share
    feature = tl.arange(0, v.block)
    into = partial_ptr + place[:, None] * v.width + feature[None, :]
    tl.store(into, output, mask=inside[:, None] & (feature < v.width)[None, :])
    tl.store(total_ptr + place, peak + tl.log2(weight), mask=inside)


@triton.jit
def together_kernel(
    partial_ptr, total_ptr, out_ptr, lse_ptr, shares, width: tl.constexpr, block: tl.constexpr
):
    """The shares of one head ``[shares, width]``, by their totals (to the base of 2);
    stores their LSE, too."""
    lane = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, block)
    inside = feature < width
    output = tl.zeros([block], tl.float32)
    weight = 0.0
    peak = float("-inf")
    for share in range(shares):
        place = lane * shares + share
        total = tl.load(total_ptr + place)
        above = tl.maximum(peak, total)
        finite = tl.where(above == float("-inf"), 0.0, above)
        more, shrink = tl.exp2(total - finite), tl.exp2(peak - finite)
        part = tl.load(partial_ptr + place * width + feature, mask=inside, other=0.0)
        output = output * shrink + part * more
        weight = weight * shrink + more
        peak = above
    weight = tl.where(weight > 0, weight, 1.0)
    output /= weight
    tl.store(lse_ptr + lane, (peak + tl.log2(weight)) / LOG2E)
    tl.store(out_ptr + lane * width + feature, output.to(out_ptr.dtype.element_ty), mask=inside)
