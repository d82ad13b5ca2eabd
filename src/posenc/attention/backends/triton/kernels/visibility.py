"""Ranges of tiles with visible pairs, and the mask of a tile.

Pairs lie on diagonal ``t = y - x + origin``, see ``Band``. Segments and orders are given token by
token and summarised by blocks of ``summary_block`` tokens, so that tiles without visible pairs are
skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.memory import clip


@triton.jit
def tile_ranges(
    x0,
    x_length,
    y_length,
    band,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    span_x: tl.constexpr,
    span_y: tl.constexpr,
):
    """Bounds of the loops over tiles of y: ``begin, clear, near, far, edge, end``.

    Tiles outside ``begin`` to ``end`` have no pair in the band, so a window bounds the loop here.
    Tiles before ``clear`` and from ``edge`` on may hold hidden pairs and are masked. Tiles before
    ``near`` read the low entry alone, those from ``far`` on the high one, as does all of the
    ``span_x`` tokens of x by ``span_y`` of y that they are in.
    """
    start = x0 - band.origin
    last = tl.minimum(x0 + block_x, x_length) - 1 - band.origin
    begin = tl.maximum(band.first + start, 0) // block_y
    end = tl.minimum(tl.maximum(band.last + last + 1, 0), y_length)
    end = tl.maximum((end + block_y - 1) // block_y, begin)
    clear = (tl.maximum(band.first + last, 0) + block_y - 1) // block_y
    edge = tl.minimum(tl.maximum(band.last + start + 1, 0), y_length) // block_y
    start = x0 // span_x * span_x - band.origin
    near = tl.maximum(band.low + start + 1, 0) // span_y * (span_y // block_y)
    far = (tl.maximum(band.high + start + span_x - 1, 0) + span_y - 1) // span_y
    far *= span_y // block_y
    clear = clip(clear, begin, end)
    edge = clip(edge, clear, end)
    return begin, clear, near, far, edge, end


@triton.jit
def _summary(pointer, at, count):
    """Least and greatest order and segment of a range of summary blocks."""
    inside = at < count
    order_least = tl.load(pointer + at * 4, mask=inside, other=2**60)
    order_most = tl.load(pointer + at * 4 + 1, mask=inside, other=-(2**60))
    segment_least = tl.load(pointer + at * 4 + 2, mask=inside, other=2**60)
    segment_most = tl.load(pointer + at * 4 + 3, mask=inside, other=-(2**60))
    return order_least, order_most, segment_least, segment_most


@triton.jit
def _block_summary(side, b, x0, block: tl.constexpr, summary_block: tl.constexpr):
    at = x0 // summary_block + tl.arange(0, block // summary_block)
    pointer = side.summary + b * side.summary_row
    order_least, order_most, segment_least, segment_most = _summary(
        pointer, at, tl.cdiv(side.length, summary_block)
    )
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
def _any_visible(x_summary, y_summary, band, causal: tl.constexpr, for_keys: tl.constexpr):
    """True if any pair of two sets of tokens may be visible, by their summaries."""
    any_visible = (y_summary[2] <= x_summary[3]) & (x_summary[2] <= y_summary[3])
    nearest, farthest = _steps_ahead(x_summary, y_summary, for_keys)
    if causal:
        any_visible = any_visible & (nearest <= 0)
    if band.window is not None:
        any_visible = any_visible & (nearest < band.window) & (farthest > -band.window)
    return any_visible


@triton.jit
def _all_visible(x_summary, y_summary, band, causal: tl.constexpr, for_keys: tl.constexpr):
    """True if all pairs of two sets of tokens are visible, by their summaries."""
    same = (
        (x_summary[2] == x_summary[3])
        & (y_summary[2] == y_summary[3])
        & (x_summary[2] == y_summary[2])
    )
    nearest, farthest = _steps_ahead(x_summary, y_summary, for_keys)
    if causal:
        same = same & (farthest <= 0)
    if band.window is not None:
        same = same & (farthest < band.window) & (nearest > -band.window)
    return same


@triton.jit
def narrowed(
    begin,
    end,
    x,
    y,
    band,
    b,
    x0,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    summary_block: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """The range of tiles, without those at both ends that segments or order hide wholly.

    Within it, third and fourth, a range of tiles of which all pairs are visible.
    """
    x_summary = _block_summary(x, b, x0, block_x, summary_block)
    count = tl.cdiv(y.length, summary_block)
    pointer = y.summary + b * y.summary_row
    chunk: tl.constexpr = 256
    least = count
    most = -1
    clear = count
    edge = -1
    visible_count = 0
    for start in range(0, count, chunk):
        at = start + tl.arange(0, chunk)
        y_summary = _summary(pointer, at, count)
        any_visible = _any_visible(x_summary, y_summary, band, causal, for_keys)
        least = tl.minimum(least, tl.min(tl.where(any_visible, at, count), 0))
        most = tl.maximum(most, tl.max(tl.where(any_visible, at, -1), 0))
        all_visible = _all_visible(x_summary, y_summary, band, causal, for_keys)
        clear = tl.minimum(clear, tl.min(tl.where(all_visible, at, count), 0))
        edge = tl.maximum(edge, tl.max(tl.where(all_visible, at, -1), 0))
        visible_count += tl.sum(all_visible.to(tl.int32), 0)
    begin = tl.maximum(begin, least * summary_block // block_y)
    end = tl.maximum(begin, tl.minimum(end, ((most + 1) * summary_block + block_y - 1) // block_y))
    # Granules that are not one after the other leave others between them.
    edge = tl.where(visible_count == edge - clear + 1, edge, -1)
    clear = clip((clear * summary_block + block_y - 1) // block_y, begin, end)
    return begin, end, clear, clip((edge + 1) * summary_block // block_y, clear, end)


@triton.jit
def visible_tile_ranges(
    x,
    y,
    band,
    b,
    x0,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    summary_block: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    span_x: tl.constexpr,
    span_y: tl.constexpr,
):
    """``tile_ranges``, without what segments or order hide; they hide nothing within the edges."""
    begin, clear, near, far, edge, end = tile_ranges(
        x0, x.length, y.length, band, block_x, block_y, span_x, span_y
    )
    if y.segment_ids is not None:
        begin, end, first, last = narrowed(
            begin, end, x, y, band, b, x0, causal, for_keys, summary_block, block_x, block_y
        )
        clear = clip(tl.maximum(clear, first), begin, end)
        edge = clip(tl.minimum(edge, last), clear, end)
    return begin, clear, near, far, edge, end


@triton.jit
def has_visible_pairs(
    x,
    y,
    band,
    b,
    x0,
    y0,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    summary_block: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """True if any pair of one tile may be visible."""
    x_summary = _block_summary(x, b, x0, block_x, summary_block)
    y_summary = _block_summary(y, b, y0, block_y, summary_block)
    return _any_visible(x_summary, y_summary, band, causal, for_keys)


@triton.jit
def visible(t, x, y, band, b, x_at, y_at, causal: tl.constexpr, for_keys: tl.constexpr):
    """Mask ``[x, y]`` of the visible pairs of a tile."""
    shown = (t >= band.first) & (t <= band.last) & (y_at < y.length)[None, :]
    if x.segment_ids is not None:
        x_segments = tl.load(
            x.segment_ids + b * x.segment_ids_row + x_at, mask=x_at < x.length, other=0
        )
        y_segments = tl.load(
            y.segment_ids + b * y.segment_ids_row + y_at, mask=y_at < y.length, other=0
        )
        shown = shown & (x_segments[:, None] == y_segments[None, :])
    if x.order is not None:
        x_order = tl.load(x.order + b * x.order_row + x_at, mask=x_at < x.length, other=0)
        y_order = tl.load(y.order + b * y.order_row + y_at, mask=y_at < y.length, other=0)
        ahead = y_order[None, :] - x_order[:, None]
        if for_keys:
            ahead = -ahead
        if causal:
            shown = shown & (ahead <= 0)
        if band.window is not None:
            shown = shown & (ahead < band.window) & (ahead > -band.window)
    return shown
