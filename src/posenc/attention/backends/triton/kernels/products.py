"""Products of tokens with tokens, or with the rows at both ends of a table: a number a token."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.memory import load_row, load_tokens, start_of


@triton.jit
def delta_kernel(a, b, out, length, heads, block: tl.constexpr):
    """``out[b, h, l] = a[b, h, l] · b[b, h, l]``: delta, of the gradients and the outputs."""
    blocks = tl.cdiv(length, block)
    lane = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * block + tl.arange(0, block)
    row, head = (lane // heads).to(tl.int64), lane % heads
    left = load_tokens(a, row, head, at, length).to(tl.float32)
    right = load_tokens(b, row, head, at, length).to(tl.float32)
    tl.store(start_of(out, row, head) + at, tl.sum(left * right, 1), mask=at < length)


@triton.jit
def ends_kernel(tokens, table, first, last, count, length, heads, block: tl.constexpr):
    """Products ``[B, H, L]`` of tokens with the first and the last row of a table."""
    blocks = tl.cdiv(length, block)
    lane = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * block + tl.arange(0, block)
    row, head = (lane // heads).to(tl.int64), lane % heads
    vectors = load_tokens(tokens, row, head, at, length).to(tl.float32)
    inside = at < length
    product = tl.sum(vectors * load_row(table, head, 0)[None, :], 1)
    tl.store(start_of(first, row, head) + at, product, mask=inside)
    product = tl.sum(vectors * load_row(table, head, count - 1)[None, :], 1)
    tl.store(start_of(last, row, head) + at, product, mask=inside)
