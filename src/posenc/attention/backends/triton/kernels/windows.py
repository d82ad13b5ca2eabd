"""From products with all entries that a tile meets to the tile, and back.

A square tile meets ``2 * block - 1`` entries, its window. The products of tokens with all entries
of the window, a row (or column) of products for each token, are unrolled into the tile by a
gather, and a tile is rolled up into them for the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.memory import load_window, product


@triton.jit
def window_start(x0, y0, origin, block: tl.constexpr, flip: tl.constexpr):
    """The first entry that a square tile meets, before clipping."""
    t = y0 - x0 + origin
    return -(t + block - 1) if flip else t - (block - 1)


@triton.jit
def unroll_x(first, second, block: tl.constexpr, flip: tl.constexpr):
    """A tile ``[x, y]`` from products of x with both halves of the window, ``[x, half]`` each.

    Pair (x, y) meets entry ``y - x + block - 1`` of the window (``x - y + block - 1``, flipped).
    Along a row of the tile entries follow one another; modulo the block they are a rotation of the
    half's columns, of which each is wanted from one half only.
    """
    x = tl.arange(0, block)[:, None]
    other = tl.arange(0, block)[None, :]
    if flip:
        joined = tl.where(other >= x, first, second)
        place = (x - other - 1) & (block - 1)
    else:
        joined = tl.where(other + x >= block - 1, first, second)
        place = (other - x - 1) & (block - 1)
    return tl.gather(joined, place, 1)


@triton.jit
def unroll_y(first, second, block: tl.constexpr, flip: tl.constexpr):
    """A tile ``[x, y]`` from products of y with both halves of the window, ``[half, y]`` each."""
    other = tl.arange(0, block)[:, None]
    y = tl.arange(0, block)[None, :]
    if flip:
        joined = tl.where(other + y >= block - 1, first, second)
        place = (other - y - 1) & (block - 1)
    else:
        joined = tl.where(other >= y, first, second)
        place = (y - other - 1) & (block - 1)
    return tl.gather(joined, place, 0)


@triton.jit
def roll_x(tile, block: tl.constexpr, flip: tl.constexpr):
    """Inverse of ``unroll_x``: both halves ``[x, half]``, zero where nothing is read."""
    x = tl.arange(0, block)[:, None]
    other = tl.arange(0, block)[None, :]
    if flip:
        place = (x - other - 1) & (block - 1)
        is_first = other >= x
    else:
        place = (other + x + 1) & (block - 1)
        is_first = other + x >= block - 1
    joined = tl.gather(tile, place, 1)
    return tl.where(is_first, joined, 0.0), tl.where(is_first, 0.0, joined)


@triton.jit
def roll_y(tile, block: tl.constexpr, flip: tl.constexpr):
    """Inverse of ``unroll_y``: both halves ``[half, y]``, zero where nothing is read."""
    other = tl.arange(0, block)[:, None]
    y = tl.arange(0, block)[None, :]
    if flip:
        place = (other + y + 1) & (block - 1)
        is_first = other + y >= block - 1
    else:
        place = (y - other - 1) & (block - 1)
        is_first = other >= y
    joined = tl.gather(tile, place, 0)
    return tl.where(is_first, joined, 0.0), tl.where(is_first, 0.0, joined)


@triton.jit
def window_of_x(
    tokens, table, h, start, count, precision: tl.constexpr, block: tl.constexpr, flip: tl.constexpr
):
    """The tile ``[x, y]`` of products of tokens of x with what each pair reads of a table."""
    first, second = load_window(table, h, start, count, block)
    first = product(tokens, tl.trans(first), precision)
    second = product(tokens, tl.trans(second), precision)
    return unroll_x(first, second, block, flip)


@triton.jit
def window_of_y(
    tokens, table, h, start, count, precision: tl.constexpr, block: tl.constexpr, flip: tl.constexpr
):
    """The tile ``[x, y]`` of products of tokens of y with what each pair reads of a table."""
    first, second = load_window(table, h, start, count, block)
    first = product(first, tl.trans(tokens), precision)
    second = product(second, tl.trans(tokens), precision)
    return unroll_y(first, second, block, flip)


@triton.jit
def rows_of_x(
    tile, table, h, start, count, precision: tl.constexpr, block: tl.constexpr, flip: tl.constexpr
):
    """Sums ``[x, width]`` over y of a tile's numbers times what each pair reads of a table."""
    rows, more = load_window(table, h, start, count, block)
    first, second = roll_x(tile, block, flip)
    sums = product(first.to(rows.dtype), rows, precision)
    return sums + product(second.to(more.dtype), more, precision)
