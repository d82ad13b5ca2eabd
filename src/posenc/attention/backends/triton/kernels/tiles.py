"""Pieces that all kernels are made of.

Pairs stand at ``t = y - x + origin`` and read entry ``n = clip(t, 0, count - 1)`` of everything
that depends on the offset; entry ``clip(-t, …)`` where ``flip``.

A square tile meets ``2 * block - 1`` entries, its window. The products of tokens with all entries
of the window, a row (or column) of products for each token, are unrolled into the tile by a
gather, and a tile is rolled up into them for the gradients. A tile wholly at or beyond the first
or last entry reads just that one, and one number a token is all that is added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import Tokens

NEAR = tl.constexpr(0)
LOW = tl.constexpr(1)
HIGH = tl.constexpr(2)

LOG2E = tl.constexpr(1.4426950408889634)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, precision: tl.constexpr):
    """``a @ b``, summed in float32."""
    if INTERPRETED:  # the interpreter would multiply bfloat16 as if it were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def clip(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def located(tokens, b, h):
    """The tokens of one batch row and head."""
    pointer = tokens.pointer + b.to(tl.int64) * tokens.row + h.to(tl.int64) * tokens.head
    return Tokens(pointer, tokens.row, tokens.head, tokens.step, tokens.width, tokens.block)


@triton.jit
def numbers_of(numbers, b, h):
    """Where the numbers of one batch row and head begin."""
    return numbers.pointer + b.to(tl.int64) * numbers.row + h.to(tl.int64) * numbers.head


@triton.jit
def load_tokens(tokens, at, length):
    """Vectors ``[N, block]`` of located tokens, zero beyond their length and width."""
    column = tl.arange(0, tokens.block)
    mask = (at < length)[:, None]
    if tokens.width != tokens.block:
        mask = mask & (column < tokens.width)[None, :]
    place = tokens.pointer + at.to(tl.int64)[:, None] * tokens.step + column[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def store_tokens(tokens, value, at, length):
    """Write vectors ``[N, block]`` of located tokens."""
    column = tl.arange(0, tokens.block)
    mask = (at < length)[:, None] & (column < tokens.width)[None, :]
    place = tokens.pointer + at.to(tl.int64)[:, None] * tokens.step + column[None, :]
    tl.store(place, value.to(tokens.pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(pointer, at, length, other):
    return tl.load(pointer + at, mask=at < length, other=other)


@triton.jit
def load_row(table, h, place):
    """One row ``[block]`` of a table, in float32."""
    column = tl.arange(0, table.block)
    start = table.pointer + h.to(tl.int64) * table.head + place * table.width
    return tl.load(start + column, mask=column < table.width, other=0.0).to(tl.float32)


@triton.jit
def load_window(table, h, start, count, block: tl.constexpr):
    """Both halves ``[block, width]`` of a window that begins at entry ``start``."""
    step = tl.arange(0, block)
    column = tl.arange(0, table.block)
    base = table.pointer + h.to(tl.int64) * table.head
    first = clip(start + step, 0, count - 1).to(tl.int64)[:, None] * table.width + column[None, :]
    second = clip(start + block + step, 0, count - 1).to(tl.int64)
    second = second[:, None] * table.width + column[None, :]
    if table.width == table.block:
        halves = (tl.load(base + first), tl.load(base + second))
    else:
        inside = (column < table.width)[None, :]
        halves = (
            tl.load(base + first, mask=inside, other=0.0),
            tl.load(base + second, mask=inside, other=0.0),
        )
    return halves


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
    """What ``unroll_x`` reads as it: both halves ``[x, half]``, zero where nothing is read."""
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
    """What ``unroll_y`` reads as it: both halves ``[half, y]``, zero where nothing is read."""
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


@triton.jit
def stretches(x0, x_length, y_length, place, block_x: tl.constexpr, block_y: tl.constexpr):
    """Where the tiles of a block of x begin, turn from one kind into another, and end.

    Six numbers of tiles: those before the second and from the fifth on may hold hidden pairs;
    between, the third and fourth end those at the low entry and begin those at the high one.
    """
    start = x0 - place.origin
    last = tl.minimum(x0 + block_x, x_length) - 1 - place.origin
    begin = tl.maximum(place.first + start, 0) // block_y
    end = tl.minimum(tl.maximum(place.last + last + 1, 0), y_length)
    end = tl.maximum((end + block_y - 1) // block_y, begin)
    clear = (tl.maximum(place.first + last, 0) + block_y - 1) // block_y
    edge = tl.minimum(tl.maximum(place.last + start + 1, 0), y_length) // block_y
    near = tl.maximum(place.low + start + 1, 0) // block_y
    far = (tl.maximum(place.high + last, 0) + block_y - 1) // block_y
    clear = clip(clear, begin, end)
    edge = clip(edge, clear, end)
    near = clip(near, clear, edge)
    far = clip(far, near, edge)
    return begin, clear, near, far, edge, end


@triton.jit
def _summary(pointer, at, count):
    """Least and greatest order and label of granules."""
    inside = at < count
    order_least = tl.load(pointer + at * 4, mask=inside, other=2**60)
    order_most = tl.load(pointer + at * 4 + 1, mask=inside, other=-(2**60))
    label_least = tl.load(pointer + at * 4 + 2, mask=inside, other=2**60)
    label_most = tl.load(pointer + at * 4 + 3, mask=inside, other=-(2**60))
    return order_least, order_most, label_least, label_most


@triton.jit
def _block_summary(side, b, x0, block: tl.constexpr, granule: tl.constexpr):
    at = x0 // granule + tl.arange(0, block // granule)
    pointer = side.summary + b * side.summary_row
    order_least, order_most, label_least, label_most = _summary(
        pointer, at, tl.cdiv(side.length, granule)
    )
    return (
        tl.min(order_least, 0),
        tl.max(order_most, 0),
        tl.min(label_least, 0),
        tl.max(label_most, 0),
    )


@triton.jit
def _meet(mine, theirs, place, causal: tl.constexpr, flip: tl.constexpr):
    """Whether any pair of two sets of tokens may be visible, by their summaries."""
    meet = (theirs[2] <= mine[3]) & (mine[2] <= theirs[3])
    if flip:  # mine are the keys
        nearest = mine[0] - theirs[1]
        farthest = mine[1] - theirs[0]
    else:
        nearest = theirs[0] - mine[1]
        farthest = theirs[1] - mine[0]
    if causal:
        meet = meet & (nearest <= 0)
    if place.window is not None:
        meet = meet & (nearest < place.window) & (farthest > -place.window)
    return meet


@triton.jit
def narrowed(
    begin,
    end,
    x,
    y,
    place,
    b,
    x0,
    causal: tl.constexpr,
    flip: tl.constexpr,
    granule: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """The range of tiles, without those at both ends that marks hide wholly."""
    mine = _block_summary(x, b, x0, block_x, granule)
    count = tl.cdiv(y.length, granule)
    pointer = y.summary + b * y.summary_row
    chunk: tl.constexpr = 256
    least = count
    most = -1
    for start in range(0, count, chunk):
        at = start + tl.arange(0, chunk)
        meet = _meet(mine, _summary(pointer, at, count), place, causal, flip)
        least = tl.minimum(least, tl.min(tl.where(meet, at, count), 0))
        most = tl.maximum(most, tl.max(tl.where(meet, at, -1), 0))
    begin = tl.maximum(begin, least * granule // block_y)
    end = tl.minimum(end, ((most + 1) * granule + block_y - 1) // block_y)
    return begin, tl.maximum(begin, end)


@triton.jit
def parts_of(
    x,
    y,
    place,
    b,
    x0,
    causal: tl.constexpr,
    flip: tl.constexpr,
    granule: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """``stretches``, without what marks hide wholly at both ends."""
    begin, clear, near, far, edge, end = stretches(x0, x.length, y.length, place, block_x, block_y)
    if y.label is not None:
        begin, end = narrowed(
            begin, end, x, y, place, b, x0, causal, flip, granule, block_x, block_y
        )
        clear = clip(clear, begin, end)
        near = clip(near, begin, end)
        far = clip(far, begin, end)
        edge = clip(edge, begin, end)
    return begin, clear, near, far, edge, end


@triton.jit
def tiles_meet(
    x,
    y,
    place,
    b,
    x0,
    y0,
    causal: tl.constexpr,
    flip: tl.constexpr,
    granule: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Whether any pair of one tile may be visible."""
    mine = _block_summary(x, b, x0, block_x, granule)
    theirs = _block_summary(y, b, y0, block_y, granule)
    return _meet(mine, theirs, place, causal, flip)


@triton.jit
def visible(t, x, y, place, b, x_at, y_at, causal: tl.constexpr, flip: tl.constexpr):
    """Which pairs ``[x, y]`` of a tile may see each other."""
    seen = (t >= place.first) & (t <= place.last) & (y_at < y.length)[None, :]
    if x.label is not None:
        mine = tl.load(x.label + b * x.label_row + x_at, mask=x_at < x.length, other=0)
        theirs = tl.load(y.label + b * y.label_row + y_at, mask=y_at < y.length, other=0)
        seen = seen & (mine[:, None] == theirs[None, :])
    if x.order is not None:
        mine = tl.load(x.order + b * x.order_row + x_at, mask=x_at < x.length, other=0)
        theirs = tl.load(y.order + b * y.order_row + y_at, mask=y_at < y.length, other=0)
        ahead = theirs[None, :] - mine[:, None]
        if flip:
            ahead = -ahead
        if causal:
            seen = seen & (ahead <= 0)
        if place.window is not None:
            seen = seen & (ahead < place.window) & (ahead > -place.window)
    return seen


@triton.jit
def far_numbers(numbers, tables, own, at, length, last: tl.constexpr, block: tl.constexpr):
    """What is added to the logits of each token of x in tiles at one end of the tables."""
    found = tl.zeros([block], tl.float32)
    if numbers is not None:
        found += load_numbers(numbers_of(numbers, own.b, own.h), at, length, 0.0)
    if tables.line is not None:
        line = tables.line + own.h.to(tl.int64) * tables.line_head
        found += tl.load(line + (tables.count - 1 if last else 0))
    return found


@triton.jit
def tile_logits(
    own,
    far,
    y_tokens,
    y_factor,
    x,
    y,
    tables,
    place,
    scale,
    y0,
    kind: tl.constexpr,
    masked: tl.constexpr,
    causal: tl.constexpr,
    flip: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Logits ``[x, y]`` of one tile to the base of 2, -inf where hidden, and its places.

    Args:
        own: what the program holds of x; far: its numbers where the tile reads one entry.
        y_tokens, y_factor: of the tile.
    """
    y_at = y0 + tl.arange(0, block_y)
    x_at = own.start + tl.arange(0, block_x)
    t = y_at[None, :] - x_at[:, None] + place.origin
    logits = product(own.tokens, tl.trans(y_tokens), precision) * scale
    if x.factor is not None:
        logits += product(own.factor, tl.trans(y_factor), factor_precision)
    if kind == NEAR:
        start = window_start(own.start, y0, place.origin, block_x, flip)
        if tables.line is not None:
            entry = clip(-t if flip else t, 0, tables.count - 1)
            logits += tl.load(tables.line + own.h.to(tl.int64) * tables.line_head + entry)
        if tables.x is not None:
            tl.static_assert(block_x == block_y)
            logits += window_of_x(
                own.term, tables.x, own.h, start, tables.count, precision, block_x, flip
            )
        if tables.y is not None:
            tl.static_assert(block_x == block_y)
            y_term = load_tokens(located(y.term, own.b, own.h), y_at, y.length)
            logits += window_of_y(
                y_term, tables.y, own.h, start, tables.count, precision, block_x, flip
            )
    else:
        logits += far[:, None]
        if tables.y is not None:
            numbers = y.term_low if kind == LOW else y.term_high
            numbers = load_numbers(numbers_of(numbers, own.b, own.h), y_at, y.length, 0.0)
            logits += numbers[None, :]
    if y.column is not None:
        column = load_numbers(numbers_of(y.column, own.b, own.h), y_at, y.length, 0.0)
        logits += column[None, :]
    if x.column is not None:
        logits += own.column[:, None]
    logits *= LOG2E
    if masked:
        seen = visible(t, x, y, place, own.b, x_at, y_at, causal, flip)
        logits = tl.where(seen, logits, float("-inf"))
    return logits, t


@triton.jit
def kept(
    dropout,
    lane,
    x_at,
    y_at,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    flip: tl.constexpr,
):
    """Factors ``[x, y]`` of dropout: each pair draws its own number, in whatever tile it is."""
    zero = tl.zeros([block_x, block_y], tl.int32)
    x = x_at[:, None] + zero
    y = y_at[None, :] + zero
    if flip:
        drawn, _, _, _ = tl.philox(dropout.seed, x, y, lane + zero, zero)
    else:
        drawn, _, _, _ = tl.philox(dropout.seed, y, x, lane + zero, zero)
    keep = tl.uint_to_uniform_float(drawn) >= dropout.probability
    return tl.where(keep, 1.0 / (1.0 - dropout.probability), 0.0)
