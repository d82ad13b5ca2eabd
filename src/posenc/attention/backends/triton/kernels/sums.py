"""Sums over the keys of a row from each key on, within a tile: stick breaking and CoPE.

Stick breaking (``sticks``) sums ``log2(1 + 2^s)``, s the logits to the base of 2. Contextual
positions (CoPE) sum gates, as whole numbers of ``2^-bits``: integer sums are exact in any order, so
that every kernel finds the same, and that of the next key is one subtraction away. Sums within a
tile are products with triangles of ones, which tensor cores compute.

``keys`` is the axis of a tile that the keys are on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.logits import undropped
from posenc.attention.backends.triton.kernels.memory import LOG2E, load_tokens, product
from posenc.attention.backends.triton.kernels.pairs import load_pairs, reciprocal
from posenc.attention.backends.triton.kernels.visibility import visible

EXACT = tl.constexpr(22)
"""Bits of a gate, half of them a number of 16 bits each: products sum them up exactly."""

GONE = tl.constexpr(100.0)
"""Binary logarithm of the share of a stick below which nothing is left of it."""

ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0, of which the lowest 23 are the fraction."""

NEAREST = tl.constexpr(1.5 * 2**23)
"""Added and taken away, it rounds to whole numbers."""


@triton.jit
def binary_logits(x_tokens, y_tokens, scale, precision: tl.constexpr):
    """Logits ``[x, y]`` to the base of 2."""
    return product(x_tokens, tl.trans(y_tokens), precision) * (scale * LOG2E)


@triton.jit
def query_block(x, sizes, block: tl.constexpr):
    """Start, head by batch row, batch row, head, key head, and places of a program's queries.

    Later queries see more: they go first.
    """
    blocks = tl.cdiv(x.length, block)
    x0 = (blocks - 1 - tl.program_id(0) % blocks) * block
    lane = tl.program_id(0) // blocks
    b = (lane // sizes.heads).to(tl.int64)
    h = lane % sizes.heads
    return x0, lane, b, h, h // sizes.group, x0 + tl.arange(0, block)


@triton.jit
def tile_products(x_tile, y, head, y_at, scale, precision: tl.constexpr):
    """Both tokens of the other side, logits, and gradients of weights before dropout."""
    tokens = load_tokens(y.tokens, x_tile.b, head, y_at, y.length)
    second = load_tokens(y.second, x_tile.b, head, y_at, y.length)
    logits = binary_logits(x_tile.tokens, tokens, scale, precision)
    dp = product(x_tile.second, tl.trans(second), precision)
    return tokens, second, logits, dp


@triton.jit
def visible_pairs(
    x, y, band, b, x0, y0, for_keys: tl.constexpr, block_x: tl.constexpr, block_y: tl.constexpr
):
    """Mask ``[x, y]`` of the visible pairs of a tile."""
    x_at = x0 + tl.arange(0, block_x)
    y_at = y0 + tl.arange(0, block_y)
    t = y_at[None, :] - x_at[:, None] + band.origin
    return visible(t, x, y, band, b, x_at, y_at, False, for_keys)


@triton.jit
def log2_of_one_plus(e):
    """``log2(1 + e)`` for e from 0 to 1, with a relative error of 3e-7."""
    # Minimax polynomial of log2(1 + e) / e.
    p = e * -0.012077020271935144 + 0.06274843358154066
    p = p * e - 0.15415200644816163
    p = p * e + 0.25517634922634863
    p = p * e - 0.3530963533461743
    p = p * e + 0.48001246079621496
    p = p * e - 0.7213067574280757
    return (p * e + 1.4426947245903459) * e


@triton.jit
def softplus(logits):
    return tl.maximum(logits, 0.0) + log2_of_one_plus(tl.exp2(-tl.abs(logits)))


@triton.jit
def gates_of(logits):
    """The logistic function of logits to the base of 2, and its derivative by that of e."""
    gates = reciprocal(1 + tl.exp2(tl.minimum(-logits, 126.0)))
    return gates, gates - gates * gates


@triton.jit
def to_integer(gates, bits: tl.constexpr):
    """Gates as whole numbers of ``2^-bits``."""
    # Adding 3 * 2^(22 - bits), a float32 whose last bit is 2^-bits, rounds the gate to a multiple
    # of it; less the bits of that number, those of the sum are the count.
    offset: tl.constexpr = 3 << (22 - bits)
    return (gates + offset).to(tl.int32, bitcast=True) - ((301 - 2 * bits) << 22)


@triton.jit
def halves(counts, bits: tl.constexpr):
    """Two float32 of 11 bits or fewer; the first times ``2^(bits - 11)``, and the second, add up.

    Counts are as of ``whole``. The second number is in the unit of the first.
    """
    offset: tl.constexpr = 3 << (22 - bits)
    gates = (counts + ((301 - 2 * bits) << 22)).to(tl.float32, bitcast=True) - offset
    first = (gates * 2048 + NEAREST) - NEAREST
    return first, gates * 2048 - first


@triton.jit
def joined(first, second, more, bits: tl.constexpr):
    """``more`` and the counts of which ``first`` and ``second`` are sums of ``halves``."""
    shift: tl.constexpr = bits - 11
    offset: tl.constexpr = 3 << (22 - shift)
    high = (first + NEAREST).to(tl.int32, bitcast=True) << shift
    low = (second + offset).to(tl.int32, bitcast=True)
    # The bits of both offsets, modulo 2^32.
    extra: tl.constexpr = ((301 << 22) << shift) + ((301 - 2 * shift) << 22)
    less: tl.constexpr = ((extra + 2**31) & 0xFFFFFFFF) - 2**31
    more = tl.sub(more, less, sanitize_overflow=False)
    return tl.add(tl.add(high, low, sanitize_overflow=False), more, sanitize_overflow=False)


@triton.jit
def at_most(counts, limit):
    """The least of counts and their limit; that for counts below 0, as those of NaN may be."""
    bound = limit.to(tl.uint32, bitcast=True)
    return tl.minimum(counts.to(tl.uint32, bitcast=True), bound).to(tl.int32, bitcast=True)


@triton.jit
def fraction(counts, bits: tl.constexpr):
    """The fractions of counts in units of ``2^-bits``, plus 1."""
    mantissa = (counts << (23 - bits)) & 0x7FFFFF
    return (mantissa | ONE).to(tl.float32, bitcast=True)


@triton.jit
def triangle(size: tl.constexpr, lower: tl.constexpr):
    """A matrix of ones on and below (or above) the diagonal."""
    row = tl.arange(0, size)[:, None]
    column = tl.arange(0, size)[None, :]
    return tl.where(row >= column if lower else row <= column, 1.0, 0.0).to(tl.float16)


@triton.jit
def _times(values, ones, start, keys: tl.constexpr):
    left, right = (values, ones) if keys == 1 else (ones, values)
    return product(left, right, "ieee", start)


@triton.jit
def sums_after(added, ones, carried, sticks: tl.constexpr, bits: tl.constexpr, keys: tl.constexpr):
    """Sums of a tile's addends over each key and those after it, by products with 16-bit numbers.

    Args:
        added: as of ``addends``.
        ones: a ``triangle``, lower if keys are on axis 1, else upper.
        carried: what is added to all.
    """
    if sticks:
        # Two float16 have 22 bits of a float32's 24; beyond 60000 the weight is 0 whatever is left.
        first = tl.minimum(added, 60000.0).to(tl.float16)
        second = (added - first.to(tl.float32)).to(tl.float16)
        sums = _times(first, ones, _times(second, ones, None, keys), keys) + carried
    else:
        first, second = halves(added, bits)
        first = _times(first.to(tl.float16), ones, None, keys)
        second = _times(second.to(tl.float16), ones, None, keys)
        sums = joined(first, second, carried, bits)
    return sums


@triton.jit
def sums_until(values, ones, terms: tl.constexpr, keys: tl.constexpr):
    """Sums of a tile's values over each key and those before it.

    Args:
        ones: a ``triangle`` in bfloat16, upper if keys are on axis 1, else lower.
        terms: numbers of 16 bits that values are split into, of 8 significant bits each.
    """
    sums = None
    for term in tl.static_range(terms):
        leading = values
        if term < terms - 1:  # the upper half of a float32 is a bfloat16
            leading = values.to(tl.int32, bitcast=True) & -65536
            leading = leading.to(tl.float32, bitcast=True)
        sums = _times(leading.to(tl.bfloat16), ones, sums, keys)
        values -= leading
    return sums


@triton.jit
def addends(logits, shown, sticks: tl.constexpr, masked: tl.constexpr, bits: tl.constexpr):
    """The summands of a tile: binary softplus of logits, or gates; 0 where hidden."""
    if sticks:
        added = softplus(logits)
    else:
        gates, _ = gates_of(logits)
        added = to_integer(gates, bits)
    if masked:
        added = tl.where(shown, added, 0)
    return added


@triton.jit
def entries(pairs, rows, counts, bits: tl.constexpr):
    """Products with the vectors at counts, and how they rise with the count, both times log2(e).

    Args:
        pairs: pointer to the pairs of numbers of a block of queries; rows: where each query's are.
        counts: at most the last pair's.
    """
    first, rise = load_pairs(pairs, rows + (counts >> bits))
    return first + fraction(counts, bits) * rise, rise


@triton.jit
def pairs_of(pairs, start, length, lane, width: tl.constexpr):
    """Pointer to the pairs of the queries from ``start`` on."""
    return pairs + (lane.to(tl.int64) * length + start) * width


@triton.jit
def rows_of(start, length, width: tl.constexpr, block: tl.constexpr):
    """Offsets of the pairs of a block of queries; those beyond their length are the last one's."""
    return tl.minimum(tl.arange(0, block), length - 1 - start) * width


@triton.jit
def last_entries(pairs, rows, width: tl.constexpr):
    """The term ``[x]`` of all pairs with the highest count, times log2(e)."""
    return tl.load(pairs + rows + (width - 1)).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def tile_gradients(
    logits,
    dp,
    shown,
    pairs,
    rows,
    carried,
    d_sums,
    lse,
    delta,
    limit,
    after_ones,
    until_ones,
    sticks: tl.constexpr,
    masked: tl.constexpr,
    bits: tl.constexpr,
    terms: tl.constexpr,
    keys: tl.constexpr,
):
    """Weights, gradients of logits, and sums over the keys, of one tile.

    Args:
        dp: gradients of weights; carried: sums before the tile; d_sums: those of gradients.
        after_ones, until_ones: as of ``sums_after`` and ``sums_until``.
        keys: the tile's axis of keys; numbers a query are along the other.

    Returns:
        Weights, gradients of logits (dz), and sums of the addends' gradients over each row; of
        contextual positions also ds, by which products are weighted, the sums, and those of the
        next keys.
    """
    if sticks:
        added = softplus(logits)
        beta = tl.exp2(logits - added)
        if masked:
            added = tl.where(shown, added, 0.0)
        sums = sums_after(added, after_ones, carried, sticks, bits, keys)
        weights = tl.exp2(logits - sums)
        if masked:
            weights = tl.where(shown, weights, 0.0)
        d_addend = weights * dp
        ds = d_addend
        dz = d_addend - beta * (sums_until(d_addend, until_ones, terms, keys) + d_sums)
        after = sums
    else:
        gates, slope = gates_of(logits)
        added = to_integer(gates, bits)
        if masked:
            added = tl.where(shown, added, 0)
        sums = sums_after(added, after_ones, carried, sticks, bits, keys)
        after = at_most(sums - added, limit)
        sums = at_most(sums, limit)
        more, rise = entries(pairs, rows, sums, bits)
        weights = tl.exp2(logits + more - lse)
        if masked:
            weights = tl.where(shown, weights, 0.0)
        ds = weights * (dp - delta)
        d_addend = ds * rise / LOG2E
        dz = ds + slope * (sums_until(d_addend, until_ones, terms, keys) + d_sums)
    if masked:
        dz = tl.where(shown, dz, 0.0)
    return weights, dz, tl.sum(d_addend, keys), ds, sums, after


@triton.jit
def self_weights(
    x,
    y,
    band,
    dropout,
    b,
    lane,
    x0,
    query_start,
    for_keys: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Factors ``[x]`` of the pairs of each token with itself: 0 where hidden or dropped."""
    at = x0 + tl.arange(0, block_x)
    other = at - band.origin
    shown = (at < x.length) & (other >= 0) & (other < y.length)
    if x.segment_ids is not None:
        x_segments = tl.load(x.segment_ids + b * x.segment_ids_row + at, mask=shown, other=0)
        y_segments = tl.load(y.segment_ids + b * y.segment_ids_row + other, mask=shown, other=0)
        shown = shown & (x_segments == y_segments)
    factor = tl.where(shown, 1.0, 0.0)
    if dropout is not None:
        kept_factor = tl.zeros([block_x], tl.float32)
        first = tl.maximum(x0 - band.origin, 0)
        end = tl.minimum(tl.maximum(x0 - band.origin + block_x, 0), y.length)
        for tile in range(first // block_y, tl.cdiv(end, block_y)):
            y_at = tile * block_y + tl.arange(0, block_y)
            keep = undropped_pairs(
                dropout, lane, x0, tile * block_y, query_start, for_keys, block_x, block_y
            )
            same = keep & (y_at[None, :] == other[:, None])
            kept_factor += tl.sum(tl.where(same, dropout.factor, 0.0), 1)
        factor *= kept_factor
    return factor


@triton.jit
def undropped_pairs(
    dropout,
    lane,
    x0,
    y0,
    query_start,
    for_keys: tl.constexpr,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
):
    """Mask ``[x, y]`` of the pairs that dropout keeps, of queries from ``query_start`` on."""
    if for_keys:
        y0 += query_start
    else:
        x0 += query_start
    return undropped(dropout, lane, x0, y0, block_x, block_y, for_keys)
