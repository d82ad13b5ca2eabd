"""Queries and keys whose pairs of features are turned as they are read, and gradients back.

Members of pairs are kept apart: products are sums of two of half the width, and nothing has to be
moved between registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Turn
from posenc.attention.backends.triton.kernels.memory import load_tokens, located, store_tokens


@triton.jit
def located_turn(turn, b, h):
    """The factors of one batch row and head."""
    pointer = turn.pointer + b.to(tl.int64) * turn.row + h.to(tl.int64) * turn.head
    return Turn(
        pointer, turn.row, turn.head, turn.step, turn.pairs, turn.half, turn.block, turn.adjacent
    )


@triton.jit
def _members(turn, width: tl.constexpr):
    """Features that are first and second members of pairs, ``[block]``; ``width`` for none.

    Those that are not turned are paired as well; the last may be left without a partner.
    """
    column = tl.arange(0, turn.block)
    if turn.adjacent:
        first = 2 * column
        second = first + 1
    else:
        first = column
        second = column + turn.half
        if turn.pairs != turn.half:
            first = tl.where(column < turn.pairs, column, column + turn.pairs)
            second = tl.where(column < turn.pairs, column + turn.pairs, second)
    if turn.half != turn.block:
        first = tl.where(column < turn.half, first, width)
        second = tl.where(column < turn.half, second, width)
    return first, second


@triton.jit
def _factors(turn, at, inside):
    """Cosines and sines ``[N, block]`` of located factors; 1 and 0 for what is not turned."""
    column = tl.arange(0, turn.block)
    mask = inside[:, None]
    if turn.pairs != turn.block:
        mask = mask & (column < turn.pairs)[None, :]
    place = turn.pointer + at.to(tl.int64)[:, None] * turn.step + column[None, :]
    cosine = tl.load(place, mask=mask, other=1.0)
    return cosine, tl.load(place + turn.pairs, mask=mask, other=0.0)


@triton.jit
def load_turned(tokens, turn, at, inside):
    """First and second members ``[N, block]`` of the pairs of located tokens, turned."""
    first_at, second_at = _members(turn, tokens.width)
    place = tokens.pointer + at.to(tl.int64)[:, None] * tokens.step
    first_mask = inside[:, None]
    second_mask = inside[:, None]
    if tokens.width != 2 * turn.block:
        first_mask = first_mask & (first_at < tokens.width)[None, :]
        second_mask = second_mask & (second_at < tokens.width)[None, :]
    first = tl.load(place + first_at[None, :], mask=first_mask, other=0.0)
    second = tl.load(place + second_at[None, :], mask=second_mask, other=0.0)
    kind = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    cosine, sine = _factors(turn, at, inside)
    return (first * cosine - second * sine).to(kind), (first * sine + second * cosine).to(kind)


@triton.jit
def load_side(side, b, h, at):
    """Tokens of a side as they enter products: themselves and None, or members of pairs."""
    if side.turn is None:
        found = (load_tokens(located(side.tokens, b, h), at, side.length), None)
    else:
        # Not given names, which would make what is known when it is compiled known no more.
        # fmt: off
        found = load_turned(
            located(side.tokens, b, h), located_turn(side.turn, b, h), at, at < side.length
        )
        # fmt: on
    return found


@triton.jit
def store_gradients(into, turn, value, partners, b, h, at, length):
    """Write gradients of tokens as ``load_side`` gave them, turned back if they were turned."""
    if turn is None:
        store_tokens(located(into, b, h), value, at, length)
    else:
        inside = at < length
        cosine, sine = _factors(located_turn(turn, b, h), at, inside)
        first_at, second_at = _members(turn, into.width)
        kind = into.pointer.dtype.element_ty
        start = into.pointer + b.to(tl.int64) * into.row + h.to(tl.int64) * into.head
        place = start + at.to(tl.int64)[:, None] * into.step
        first = (value * cosine + partners * sine).to(kind)
        first_mask = inside[:, None] & (first_at < into.width)[None, :]
        tl.store(place + first_at[None, :], first, mask=first_mask)
        second = (partners * cosine - value * sine).to(kind)
        second_mask = inside[:, None] & (second_at < into.width)[None, :]
        tl.store(place + second_at[None, :], second, mask=second_mask)
