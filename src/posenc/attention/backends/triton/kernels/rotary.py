"""Queries and keys whose pairs of features are rotated as they are read, and gradients back.

Members of pairs are kept apart, in two tiles ``[tokens, block]``: products are sums of two of half
the width, and nothing has to be moved between registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.memory import load_tokens, start_of, store_tokens


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
    # No name for a tuple: Triton 3.6 would forget the constants in it.
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
