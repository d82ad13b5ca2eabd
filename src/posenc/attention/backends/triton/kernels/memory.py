"""Reading and writing tokens, numbers a token, and rows by entry; products of matrices."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, precision: tl.constexpr, start=None):
    """``start + a @ b``, summed in float32; ``start`` is zero by default."""
    if INTERPRETED:  # the interpreter would multiply bfloat16 as if it were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, start, input_precision=precision)


@triton.jit
def clip(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


# Functions return tensors only: Triton 3.6 turns constants that a function returns into tensors.
# Offsets of tokens are int64: those of long batches exceed 2^31.


@triton.jit
def start_of(x, b, h):
    """Pointer to what ``x`` holds of one batch row and head."""
    return x.pointer + b.to(tl.int64) * x.row + h.to(tl.int64) * x.head


@triton.jit
def load_vectors(start, step, at, inside, width: tl.constexpr, block: tl.constexpr):
    """Vectors ``[N, block]`` that lie ``step`` apart, zero beyond their width or not inside."""
    column = tl.arange(0, block)
    mask = inside[:, None]
    if width != block:
        mask = mask & (column < width)[None, :]
    pointers = start + at.to(tl.int64)[:, None] * step + column[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_tokens(tokens, b, h, at, length):
    """Vectors ``[N, block]`` of one batch row and head, zero beyond their length and width."""
    start = start_of(tokens, b, h)
    return load_vectors(start, tokens.step, at, at < length, tokens.width, tokens.block)


@triton.jit
def store_tokens(tokens, b, h, value, at, length):
    """Write vectors ``[N, block]`` of one batch row and head."""
    column = tl.arange(0, tokens.block)
    mask = (at < length)[:, None] & (column < tokens.width)[None, :]
    pointers = start_of(tokens, b, h) + at.to(tl.int64)[:, None] * tokens.step + column[None, :]
    tl.store(pointers, value.to(tokens.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(pointer, at, length, other):
    """Numbers ``[N]`` of one batch row and head, ``other`` beyond their length."""
    return tl.load(pointer + at, mask=at < length, other=other)


@triton.jit
def load_row(table, h, entry):
    """One row ``[block]`` of a table, in float32."""
    column = tl.arange(0, table.block)
    start = table.pointer + h.to(tl.int64) * table.head + entry * table.width
    return tl.load(start + column, mask=column < table.width, other=0.0).to(tl.float32)


@triton.jit
def load_entries(table, h, start, count, block: tl.constexpr):
    """Rows ``[block, width]`` of a table from entry ``start`` on, those at its ends repeated."""
    column = tl.arange(0, table.block)
    entry = clip(start + tl.arange(0, block), 0, count - 1).to(tl.int64)
    pointers = table.pointer + h.to(tl.int64) * table.head
    pointers = pointers + entry[:, None] * table.width + column[None, :]
    if table.width == table.block:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=(column < table.width)[None, :], other=0.0)
    return rows
