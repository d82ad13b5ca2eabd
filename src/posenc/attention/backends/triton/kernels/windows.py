"""Relative shift: products with all entries that a tile reads become the tile, and back.

A square tile meets ``2 * block - 1`` entries, its window. The products of tokens with all entries
of the window, a row (or column) of products for each token, are unrolled into the tile by a
gather, and a tile is rolled up into them for the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from posenc.attention.backends.triton.kernels.memory import INTERPRETED, clip, load_entries, product

PAIRED = INTERPRETED
"""True to read biases two by two on any device."""


@triton.jit
def window_start(x0, y0, origin, block: tl.constexpr, for_keys: tl.constexpr):
    """The first entry that a square tile meets, before clipping."""
    t = y0 - x0 + origin
    return -(t + block - 1) if for_keys else t - (block - 1)


@triton.jit
def _unrolled(values, index, block_x: tl.constexpr, block_y: tl.constexpr):
    """The tile ``[x, y]`` of the values ``[N]`` at its places."""
    flat = tl.reshape(index, [block_x * block_y])
    return tl.reshape(tl.gather(values, flat, 0), [block_x, block_y])


@triton.jit
def window_of_biases(
    biases,
    factor,
    start,
    count,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    for_keys: tl.constexpr,
    twice: tl.constexpr,
):
    """The tile ``[x, y]`` of what each pair reads of biases, times a factor."""
    if PAIRED or (cuda_capability_geq(9, 0) and not cuda_capability_geq(12, 0)):
        tile = paired_biases(biases, factor, start, count, block_x, block_y, for_keys, twice)
    else:
        tile = single_biases(biases, factor, start, count, block_x, block_y, for_keys)
    return tile


@triton.jit
def single_biases(
    biases,
    factor,
    start,
    count,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    for_keys: tl.constexpr,
):
    """``window_of_biases``, read one by one."""
    size: tl.constexpr = triton.next_power_of_2(block_x + block_y)
    entry = clip(start + tl.arange(0, size), 0, count - 1)
    window = tl.load(biases + entry) * factor
    x = tl.arange(0, block_x)[:, None]
    y = tl.arange(0, block_y)[None, :]
    index = x - y + (block_y - 1) if for_keys else y - x + (block_x - 1)
    return _unrolled(window, index, block_x, block_y)


@triton.jit
def paired_biases(
    biases,
    factor,
    start,
    count,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    for_keys: tl.constexpr,
    twice: tl.constexpr,
):
    """``window_of_biases``, those of two neighbours read at once as a number of 64 bits.

    Registers of compute capability 9 and 10 hold neighbours together; elsewhere they would have to
    be moved. So would those that products are added to, as a thread holds numbers of x and x + 8:
    read ``twice``, from two windows, they need not be copied.
    """
    size: tl.constexpr = triton.next_power_of_2(block_x + block_y)
    at = start + tl.arange(0, size)
    even = tl.load(biases + clip(at, 0, count - 1)) * factor
    odd = tl.load(biases + clip(at - 1 if for_keys else at + 1, 0, count - 1)) * factor
    low = even.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = odd.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = tl.arange(0, block_x)[:, None]
    y = 2 * tl.arange(0, block_y // 2)[None, :]
    index = x - y + (block_y - 1) if for_keys else y - x + (block_x - 1)
    window = low | (high << 32)
    if twice:
        window = tl.reshape(tl.permute(tl.join(window, window), (1, 0)), [2 * size])
        index += x // 8 % 2 * size
    both = _unrolled(window, index, block_x, block_y // 2)
    first = both.to(tl.uint32).to(tl.float32, bitcast=True)
    second = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(first, second), [block_x, block_y])


@triton.jit
def unroll_x(first, second, block: tl.constexpr, for_keys: tl.constexpr):
    """A tile ``[x, y]`` from products of x with both halves of the window, ``[x, half]`` each.

    Pair (x, y) meets entry ``y - x + block - 1`` of the window (``x - y + block - 1``, flipped).
    """
    window = tl.permute(tl.join(first, second), (0, 2, 1))  # [x, 2, half]
    x = tl.arange(0, block)[:, None]
    y = tl.arange(0, block)[None, :]
    entry = (x - y if for_keys else y - x) + (block - 1)
    flat = tl.reshape(window, [2 * block * block])
    return _unrolled(flat, x * (2 * block) + entry, block, block)


@triton.jit
def unroll_y(window, block: tl.constexpr, for_keys: tl.constexpr):
    """A tile ``[x, y]`` from products of y with the window, ``[entry, y]``."""
    x = tl.arange(0, block)[:, None]
    y = tl.arange(0, block)[None, :]
    entry = (x - y if for_keys else y - x) + (block - 1)
    flat = tl.reshape(window, [2 * block * block])
    return _unrolled(flat, entry * block + y, block, block)


@triton.jit
def roll_x(tile, block: tl.constexpr, for_keys: tl.constexpr):
    """Inverse of ``unroll_x``: the window ``[x, entry]``, zero where nothing is read.

    Rows are padded with as many zeros, such that an entry beyond a row meets zeros of its own row
    or of the next; the one row without a next has a half of zeros only.
    """
    zeros = tl.zeros_like(tile)
    x = tl.arange(0, block)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    entry = tl.arange(0, block)[None, None, :]
    last = (half == 1) & (x == (0 if for_keys else block - 1))
    if for_keys:
        rows = tl.join(tile, zeros)
        index = x * (2 * block + 1) + block - 1 - half * block
        index = tl.where(last, 2 * block - 1, index) - entry
    else:
        rows = tl.join(zeros, tile)
        index = x * (2 * block + 1) + 1 + half * block
        index = tl.where(last, 0, index) + entry
    flat = tl.reshape(tl.permute(rows, (0, 2, 1)), [2 * block * block])
    return _unrolled(flat, index, block, 2 * block)


@triton.jit
def roll_y(tile, block: tl.constexpr, for_keys: tl.constexpr):
    """Inverse of ``unroll_y``: the window ``[entry, y]``, zero where nothing is read.

    With x and y exchanged, entries run the other way.
    """
    return tl.trans(roll_x(tl.trans(tile), block, not for_keys))


@triton.jit
def half_of_x(tokens, table, h, start, count, precision: tl.constexpr, block: tl.constexpr):
    """Products ``[x, half]`` of tokens of x with the half of a window that begins at ``start``."""
    return product(tokens, tl.trans(load_entries(table, h, start, count, block)), precision)


@triton.jit
def window_of_x(
    tokens,
    table,
    h,
    start,
    count,
    precision: tl.constexpr,
    block: tl.constexpr,
    for_keys: tl.constexpr,
):
    """The tile ``[x, y]`` of products of tokens of x with what each pair reads of a table."""
    first = half_of_x(tokens, table, h, start, count, precision, block)
    second = half_of_x(tokens, table, h, start + block, count, precision, block)
    return unroll_x(first, second, block, for_keys)


@triton.jit
def window_of_y(
    tokens,
    table,
    h,
    start,
    count,
    precision: tl.constexpr,
    block: tl.constexpr,
    for_keys: tl.constexpr,
):
    """The tile ``[x, y]`` of products of tokens of y with what each pair reads of a table."""
    rows = load_entries(table, h, start, count, 2 * block)
    return unroll_y(product(rows, tl.trans(tokens), precision), block, for_keys)


@triton.jit
def rows_of_x(
    tile,
    table,
    h,
    start,
    count,
    precision: tl.constexpr,
    block: tl.constexpr,
    for_keys: tl.constexpr,
):
    """Sums ``[x, width]`` over y of a tile's numbers times what each pair reads of a table."""
    rows = load_entries(table, h, start, count, 2 * block)
    return product(roll_x(tile.to(rows.dtype), block, for_keys), rows, precision)
