"""One tile of the backward pass: weights ``p = exp(s - lse)`` and ``ds = p (dp - delta)``."""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.logits import LOW, NEAR, tile_logits, undropped
from posenc.attention.backends.triton.kernels.memory import LOG2E, load_numbers, product, start_of
from posenc.attention.backends.triton.kernels.windows import window_of_x, window_of_y, window_start


@triton.jit
def tile_ds(
    x_tile,
    far,
    second_far,
    y_tokens,
    y_partners,
    y_second,
    y_factor,
    carried,
    x,
    y,
    tables,
    band,
    dropout,
    scale,
    y0,
    kind: tl.constexpr,
    masked: tl.constexpr,
    causal: tl.constexpr,
    for_keys: tl.constexpr,
    precision: tl.constexpr,
    factor_precision: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Weights after dropout, and ds, of a tile ``[x, y]``.

    Args:
        x_tile: the tile of x; far and second_far: its numbers where the tile reads one
            entry, for the logits and (of queries) for the gradients of weights.
        y_tokens, y_partners, y_second, y_factor: of the tile; carried: as in ``tile_logits``.
    """
    logits, carried = tile_logits(
        x_tile, far, y_tokens, y_partners, y_factor, carried, x, y, tables, band, scale, y0, kind,
        masked, causal, for_keys, True, precision, factor_precision, block_x, block_y,
    )
    y_at = y0 + tl.arange(0, block_y)
    if for_keys:
        shift = load_numbers(start_of(y.lse, x_tile.b, x_tile.h), y_at, y.length, float("inf"))
        # Rows without visible keys have an lse of -inf: +inf makes their weights 0.
        shift = tl.where(shift == float("-inf"), float("inf"), shift * LOG2E)[None, :]
        delta = load_numbers(start_of(y.delta, x_tile.b, x_tile.h), y_at, y.length, 0.0)[None, :]
    else:
        shift = tl.where(x_tile.lse == float("-inf"), float("inf"), x_tile.lse * LOG2E)[:, None]
        delta = x_tile.delta[:, None]
    # What is added to all logits of a row is taken off its lse, a number a row instead of a tile.
    if tables.softcap is None:
        if kind != NEAR:
            shift = shift - (far * LOG2E)[:, None]
        if x.column is not None:
            shift = shift - (x_tile.column * LOG2E)[:, None]
    weights = tl.exp2(logits * (scale * LOG2E) - shift)  # [x, y]
    if tables.value is not None and kind == NEAR:
        start = window_start(x_tile.start, y0, band.origin, block_x, for_keys)
        if for_keys:
            dp = window_of_y(
                y_second, tables.value, x_tile.h, start, tables.count, precision, block_x, for_keys
            )
        else:
            dp = window_of_x(
                x_tile.second, tables.value, x_tile.h, start, tables.count, precision, block_x,
                for_keys
            )
        dp = product(x_tile.second, tl.trans(y_second), precision, dp)  # [x, y]
    else:
        dp = product(x_tile.second, tl.trans(y_second), precision)
        if tables.value is not None:
            if for_keys:
                numbers = y.second_low if kind == LOW else y.second_high
                numbers = load_numbers(start_of(numbers, x_tile.b, x_tile.h), y_at, y.length, 0.0)
                dp += numbers[None, :]
            else:
                dp += second_far[:, None]
    dropped = weights
    if dropout is not None:
        keep = undropped(dropout, x_tile.lane, x_tile.start, y0, block_x, block_y, for_keys)
        dp = tl.where(keep, dp * dropout.factor, 0.0)
        dropped = tl.where(keep, weights * dropout.factor, 0.0)
    ds = weights * (dp - delta)
    if tables.softcap is not None:
        tangent = tl.maximum(logits * (scale / tables.softcap), -1.0)  # -inf where hidden
        ds *= 1 - tangent * tangent
    return dropped, ds, carried
