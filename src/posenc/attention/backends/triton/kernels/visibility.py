"""Ranges of tiles with visible pairs, the mask of a tile, and which of its weights dropout keeps.

Pairs lie on diagonal ``t = y - x + origin``, see ``Band``. Segments and orders are given token by
token and summarised by blocks of ``summary_block`` tokens, so that tiles without visible pairs are
skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.arguments import TileRanges
from posenc.attention.backends.triton.kernels.memory import clip


@triton.jit
def tile_ranges(
    args, x0, block_x: tl.constexpr, block_y: tl.constexpr, span: tl.constexpr = None
):
    """Ranges of tiles of y, by the band alone.

    Tiles outside ``begin`` to ``end`` have no pair in the band, so a window bounds the loop here.
    Tiles before ``clear`` and from ``edge`` on may hold hidden pairs and are masked. Tiles before
    ``low_end`` read the low entry alone, those from ``high_begin`` on the high one, as does all of
    the ``span`` tokens of x by ``span`` of y that they are in; None: of the tile itself.
    """
    span_x: tl.constexpr = block_x if span is None else span
    span_y: tl.constexpr = block_y if span is None else span
    start = x0 - args.band.origin
    last = tl.minimum(x0 + block_x, args.x.length) - 1 - args.band.origin
    begin = tl.maximum(args.band.first + start, 0) // block_y
    end = tl.minimum(tl.maximum(args.band.last + last + 1, 0), args.y.length)
    end = tl.maximum((end + block_y - 1) // block_y, begin)
    clear = (tl.maximum(args.band.first + last, 0) + block_y - 1) // block_y
    edge = tl.minimum(tl.maximum(args.band.last + start + 1, 0), args.y.length) // block_y
    start = x0 // span_x * span_x - args.band.origin
    low_end = tl.maximum(args.band.low + start + 1, 0) // span_y * (span_y // block_y)
    high_begin = (tl.maximum(args.band.high + start + span_x - 1, 0) + span_y - 1) // span_y
    high_begin *= span_y // block_y
    clear = clip(clear, begin, end)
    return TileRanges(begin, clear, low_end, high_begin, clip(edge, clear, end), end)


@triton.jit
def _summary(side, b, at, summary_block: tl.constexpr):
    """Least and greatest order and segment of summary blocks."""
    inside = at < tl.cdiv(side.length, summary_block)
    pointer = side.summary + b * side.summary_row + at * 4
    order_least = tl.load(pointer, mask=inside, other=2**60)
    order_most = tl.load(pointer + 1, mask=inside, other=-(2**60))
    segment_least = tl.load(pointer + 2, mask=inside, other=2**60)
    segment_most = tl.load(pointer + 3, mask=inside, other=-(2**60))
    return order_least, order_most, segment_least, segment_most


@triton.jit
def _tile_summary(side, b, start, block: tl.constexpr, summary_block: tl.constexpr):
    at = start // summary_block + tl.arange(0, block // summary_block)
    order_least, order_most, segment_least, segment_most = _summary(side, b, at, summary_block)
    return (
        tl.min(order_least, 0),
        tl.max(order_most, 0),
        tl.min(segment_least, 0),
        tl.max(segment_most, 0),
    )


@triton.jit
def _steps_ahead(x_summary, y_summary, for_keys: tl.constexpr):
    """Least and most steps that a key of two sets of tokens is ahead of a query."""
    if for_keys:  # x are the keys
        nearest = x_summary[0] - y_summary[1]
        farthest = x_summary[1] - y_summary[0]
    else:
        nearest = y_summary[0] - x_summary[1]
        farthest = y_summary[1] - x_summary[0]
    return nearest, farthest


@triton.jit
def _any_visible(args, x_summary, y_summary):
    """True if any pair of two sets of tokens may be visible, by their summaries."""
    any_visible = (y_summary[2] <= x_summary[3]) & (x_summary[2] <= y_summary[3])
    nearest, farthest = _steps_ahead(x_summary, y_summary, args.for_keys)
    if args.causal:
        any_visible = any_visible & (nearest <= 0)
    if args.band.window is not None:
        any_visible = any_visible & (nearest < args.band.window) & (farthest > -args.band.window)
    return any_visible


@triton.jit
def _all_visible(args, x_summary, y_summary):
    """True if all pairs of two sets of tokens are visible, by their summaries."""
    same = (
        (x_summary[2] == x_summary[3])
        & (y_summary[2] == y_summary[3])
        & (x_summary[2] == y_summary[2])
    )
    nearest, farthest = _steps_ahead(x_summary, y_summary, args.for_keys)
    if args.causal:
        same = same & (farthest <= 0)
    if args.band.window is not None:
        same = same & (farthest < args.band.window) & (nearest > -args.band.window)
    return same


@triton.jit
def _narrowed(args, ranges, b, x0, block_x: tl.constexpr, block_y: tl.constexpr):
    """The range of tiles, without those at both ends that segments or order hide wholly.

    Within it, third and fourth, a range of tiles of which all pairs are visible.
    """
    summary_block: tl.constexpr = args.summary_block
    x_summary = _tile_summary(args.x, b, x0, block_x, summary_block)
    count = tl.cdiv(args.y.length, summary_block)
    chunk: tl.constexpr = 256
    least = count
    most = -1
    clear = count
    edge = -1
    visible_count = 0
    for start in range(0, count, chunk):
        at = start + tl.arange(0, chunk)
        y_summary = _summary(args.y, b, at, summary_block)
        any_visible = _any_visible(args, x_summary, y_summary)
        least = tl.minimum(least, tl.min(tl.where(any_visible, at, count), 0))
        most = tl.maximum(most, tl.max(tl.where(any_visible, at, -1), 0))
        all_visible = _all_visible(args, x_summary, y_summary)
        clear = tl.minimum(clear, tl.min(tl.where(all_visible, at, count), 0))
        edge = tl.maximum(edge, tl.max(tl.where(all_visible, at, -1), 0))
        visible_count += tl.sum(all_visible.to(tl.int32), 0)
    begin = tl.maximum(ranges.begin, least * summary_block // block_y)
    end = tl.minimum(ranges.end, ((most + 1) * summary_block + block_y - 1) // block_y)
    end = tl.maximum(begin, end)
    # Blocks that are not one after the other leave others between them.
    edge = tl.where(visible_count == edge - clear + 1, edge, -1)
    clear = clip((clear * summary_block + block_y - 1) // block_y, begin, end)
    return begin, end, clear, clip((edge + 1) * summary_block // block_y, clear, end)


@triton.jit
def visible_tile_ranges(
    args, b, x0, block_x: tl.constexpr, block_y: tl.constexpr, span: tl.constexpr = None
):
    """``tile_ranges``, without what segments or order hide; they hide nothing within the edges."""
    ranges = tile_ranges(args, x0, block_x, block_y, span)
    if args.y.segment_ids is not None:
        begin, end, first, last = _narrowed(args, ranges, b, x0, block_x, block_y)
        clear = clip(tl.maximum(ranges.clear, first), begin, end)
        edge = clip(tl.minimum(ranges.edge, last), clear, end)
        ranges = TileRanges(begin, clear, ranges.low_end, ranges.high_begin, edge, end)
    return ranges


@triton.jit
def has_visible_pairs(args, b, x0, y0, block: tl.constexpr):
    """True if any pair of one square tile may be visible."""
    x_summary = _tile_summary(args.x, b, x0, block, args.summary_block)
    y_summary = _tile_summary(args.y, b, y0, block, args.summary_block)
    return _any_visible(args, x_summary, y_summary)


@triton.jit
def segments_of(side, b, at, inside):
    """Segments ``[N]`` of tokens of a side."""
    return tl.load(side.segment_ids + b * side.segment_ids_row + at, mask=inside, other=0)


@triton.jit
def _orders_of(side, b, at):
    return tl.load(side.order + b * side.order_row + at, mask=at < side.length, other=0)


@triton.jit
def visible(args, b, x_at, y_at):
    """Mask ``[x, y]`` of the visible pairs of a tile."""
    t = y_at[None, :] - x_at[:, None] + args.band.origin
    shown = (t >= args.band.first) & (t <= args.band.last) & (y_at < args.y.length)[None, :]
    if args.x.segment_ids is not None:
        x_segments = segments_of(args.x, b, x_at, x_at < args.x.length)
        y_segments = segments_of(args.y, b, y_at, y_at < args.y.length)
        shown = shown & (x_segments[:, None] == y_segments[None, :])
    if args.x.order is not None:
        ahead = _orders_of(args.y, b, y_at)[None, :] - _orders_of(args.x, b, x_at)[:, None]
        if args.for_keys:
            ahead = -ahead
        if args.causal:
            shown = shown & (ahead <= 0)
        if args.band.window is not None:
            shown = shown & (ahead < args.band.window) & (ahead > -args.band.window)
    return shown


@triton.jit
def philox(seed, first, second, third):
    """Four random words of 32 bits for each counter ``(first, second, third, 0)``.

    Philox-4x32 of Salmon et al. (2011), in the seven rounds that are the fewest to pass all of
    their tests. Triton's own computes both halves of a product apart.
    """
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = first.to(tl.uint32)
    b = second.to(tl.uint32)
    c = third.to(tl.uint32)
    d = tl.zeros_like(a)
    for _ in tl.static_range(7):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ key_low
        b = right.to(tl.uint32)
        c = (left >> 32).to(tl.uint32) ^ d ^ key_high
        d = left.to(tl.uint32)
        key_low = tl.add(key_low, 0x9E3779B9, sanitize_overflow=False)
        key_high = tl.add(key_high, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def undropped(args, tile, y0, block_y: tl.constexpr):
    """Mask ``[x, y]`` of the pairs that dropout keeps: the same for a pair in whatever tile it is.

    One draw of 128 bits serves eight pairs, of the queries i and i + 8 and the keys j, j + 1,
    j + 8 and j + 9: those that a thread holds of the logits.
    """
    block_x: tl.constexpr = tile.at.shape[0]
    keys: tl.constexpr = block_x if args.for_keys else block_y
    queries: tl.constexpr = block_y if args.for_keys else block_x
    key_start = tile.start if args.for_keys else y0
    query_start = y0 if args.for_keys else tile.start
    if args.query_start is not None:
        query_start += args.query_start
    query = tl.arange(0, queries // 2)
    query = query_start + query // 8 * 16 + query % 8
    key = tl.arange(0, keys // 4)
    key = key_start + key // 4 * 16 + key % 4 * 2
    if args.for_keys:
        zero = tl.zeros([keys // 4, queries // 2], tl.int32)
        query = query[None, :] + zero
        key = key[:, None] + zero
    else:
        zero = tl.zeros([queries // 2, keys // 4], tl.int32)
        query = query[:, None] + zero
        key = key[None, :] + zero
    a, b, c, d = philox(tile.seed, key, query, tile.lane + zero)
    words = tl.join(tl.join(a, b), tl.join(c, d))  # keys one apart, then queries eight apart
    bits = tl.join(words << 16, words)  # keys eight apart: the upper 16 bits of each
    if args.for_keys:
        bits = tl.reshape(bits, [keys // 16, 4, queries // 16, 8, 2, 2, 2])
        bits = tl.permute(bits, (0, 6, 1, 4, 2, 5, 3))
    else:
        bits = tl.reshape(bits, [queries // 16, 8, keys // 16, 4, 2, 2, 2])
        bits = tl.permute(bits, (0, 5, 1, 2, 6, 3, 4))
    return tl.reshape(bits, [block_x, block_y]) >= args.dropout.threshold.to(tl.uint32)
