"""Reading and writing tokens, numbers a token, rows by entry and pairs; products of matrices.

Queries and keys may be rotated as they are read. Members of pairs of features are kept apart then,
in two tiles ``[tokens, block]``: products are sums of two of half the width, and nothing has to be
moved between registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

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


@triton.jit
def by_query(numbers, for_keys: tl.constexpr):
    """Numbers ``[queries]`` along the axis of a tile ``[x, y]`` that queries are on."""
    return numbers[None, :] if for_keys else numbers[:, None]


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
def load_numbers(numbers, b, h, at, length, other):
    """Numbers ``[N]`` of one batch row and head, ``other`` beyond their length."""
    return tl.load(start_of(numbers, b, h) + at, mask=at < length, other=other)


@triton.jit
def store_numbers(numbers, b, h, value, at, length):
    """Write numbers ``[N]`` of one batch row and head."""
    tl.store(start_of(numbers, b, h) + at, value, mask=at < length)


@triton.jit
def load_row(table, h, entry):
    """One row ``[block]`` of a table, in float32."""
    column = tl.arange(0, table.block)
    start = table.pointer + h.to(tl.int64) * table.head + entry * table.width
    return tl.load(start + column, mask=column < table.width, other=0.0).to(tl.float32)


@triton.jit
def load_rows(table, h, entry, inside):
    """Rows ``[N, block]`` of a table at entries, zero where not inside."""
    start = table.pointer + h.to(tl.int64) * table.head
    return load_vectors(start, table.width, entry, inside, table.width, table.block)


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


@triton.jit
def _members(rotary, width: tl.constexpr):
    """Features that are first and second members of pairs, ``[block]``; ``width`` for none.

    Those that are not rotated are paired as well; the last may be left without a partner.
    """
    column = tl.arange(0, rotary.block)
    if rotary.adjacent:
        first = 2 * column
        second = first + 1
    else:
        first = column
        second = column + rotary.half
        if rotary.pairs != rotary.half:
            first = tl.where(column < rotary.pairs, column, column + rotary.pairs)
            second = tl.where(column < rotary.pairs, column + rotary.pairs, second)
    if rotary.half != rotary.block:
        first = tl.where(column < rotary.half, first, width)
        second = tl.where(column < rotary.half, second, width)
    return first, second


@triton.jit
def _factors(rotary, start, step, at, inside):
    """Cosines and sines ``[N, block]`` from ``start`` on; 1 and 0 for what is not rotated."""
    column = tl.arange(0, rotary.block)
    mask = inside[:, None]
    if rotary.pairs != rotary.block:
        mask = mask & (column < rotary.pairs)[None, :]
    pointers = start + at.to(tl.int64)[:, None] * step + column[None, :]
    cosine = tl.load(pointers, mask=mask, other=1.0)
    return cosine, tl.load(pointers + rotary.pairs, mask=mask, other=0.0)


@triton.jit
def load_rotated(start, step, width: tl.constexpr, rotary, factors, factors_step, at, inside):
    """First and second members ``[N, block]`` of the pairs of vectors, rotated.

    Vectors lie ``step`` apart from ``start`` on, and their factors likewise from ``factors`` on.
    """
    first_at, second_at = _members(rotary, width)
    pointers = start + at.to(tl.int64)[:, None] * step
    first_mask = inside[:, None]
    second_mask = inside[:, None]
    if width != 2 * rotary.block:
        first_mask = first_mask & (first_at < width)[None, :]
        second_mask = second_mask & (second_at < width)[None, :]
    first = tl.load(pointers + first_at[None, :], mask=first_mask, other=0.0)
    second = tl.load(pointers + second_at[None, :], mask=second_mask, other=0.0)
    kind = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    cosine, sine = _factors(rotary, factors, factors_step, at, inside)
    return (first * cosine - second * sine).to(kind), (first * sine + second * cosine).to(kind)


@triton.jit
def load_side(side, b, h, at):
    """Tokens of a side as they enter products: members of pairs, or themselves twice."""
    if side.rotary is None:
        first = load_tokens(side.tokens, b, h, at, side.length)
        second = first
    else:
        first, second = load_rotated(
            start_of(side.tokens, b, h), side.tokens.step, side.tokens.width,
            side.rotary, start_of(side.rotary, b, h), side.rotary.step, at, at < side.length,
        )
    return first, second


@triton.jit
def store_gradients(into, rotary, value, partners, b, h, at, length):
    """Write gradients of tokens as ``load_side`` gave them, rotated back if they were rotated."""
    if rotary is None:
        store_tokens(into, b, h, value, at, length)
    else:
        inside = at < length
        cosine, sine = _factors(rotary, start_of(rotary, b, h), rotary.step, at, inside)
        first_at, second_at = _members(rotary, into.width)
        kind = into.pointer.dtype.element_ty
        pointers = start_of(into, b, h) + at.to(tl.int64)[:, None] * into.step
        first = (value * cosine + partners * sine).to(kind)
        first_mask = inside[:, None] & (first_at < into.width)[None, :]
        tl.store(pointers + first_at[None, :], first, mask=first_mask)
        second = (partners * cosine - value * sine).to(kind)
        second_mask = inside[:, None] & (second_at < into.width)[None, :]
        tl.store(pointers + second_at[None, :], second, mask=second_mask)

# Pairs of float32 at places that each element of a tile names. Before loads and stores of Triton a
# tile moves through shared memory to a layout in which places that follow one another are a warp's,
# and back. Here places follow from counts: on CUDA each thread reads and writes those of the
# elements that it holds, by instructions of its own.


@triton.jit
def reciprocal(x):
    """``1 / x`` for normal x, with an error of an ulp."""
    if INTERPRETED or not is_cuda():
        inverse = 1 / x
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def load_pairs(start, at):
    """Both numbers of the pairs at places, counted from the pointer ``start``."""
    if INTERPRETED or not is_cuda():
        both = tl.load(start + at)
        first = both.to(tl.uint32).to(tl.float32, bitcast=True)
        second = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [start + at],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return first, second


@triton.jit
def store_pairs(start, at, first, second, mask):
    """Write pairs to places, counted from the pointer ``start``, where the mask holds."""
    if INTERPRETED or not is_cuda():
        low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = second.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(start + at, (low | (high << 32)).to(tl.int64, bitcast=True), mask=mask)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            setp.ne.s32 chosen, $4, 0;
            @chosen st.global.v2.f32 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,f,f,r",
            [(start + at).to(tl.int64), first, second, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
