"""Attention with sums over the keys of a row from each key on: stick breaking and CoPE.

Stick breaking (``sticks``) sums ``log2(1 + 2^s)``, s the logits to the base of 2. Contextual
positions (CoPE) sum gates, as whole numbers of ``2^-bits``: integer sums are exact in any order, so
that every kernel finds the same, and that of the next key is one subtraction away. Sums within a
tile are products with triangles of ones, which tensor cores compute; from tile to tile they are
carried, from the last key to the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from posenc.attention.backends.triton.kernels.configs import (
    SUMS_FORWARD,
    SUMS_QUERIES,
    fitting_sums,
)
from posenc.attention.backends.triton.kernels.logits import query_tile, softmax_step
from posenc.attention.backends.triton.kernels.memory import (
    LOG2E,
    by_query,
    load_pairs,
    load_tokens,
    product,
    reciprocal,
    store_numbers,
    store_tokens,
)
from posenc.attention.backends.triton.kernels.visibility import (
    segments_of,
    undropped,
    visible,
    visible_tile_ranges,
)

EXACT = tl.constexpr(22)
"""Bits of a gate, half of them a number of 16 bits each: products sum them up exactly."""

GONE = tl.constexpr(100.0)
"""Binary logarithm of the share of a stick below which nothing is left of it."""

ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0, of which the lowest 23 are the fraction."""

NEAREST = tl.constexpr(1.5 * 2**23)
"""Added and taken away, it rounds to whole numbers."""


@triton.jit
def binary_logits(args, tile, tokens):
    """Logits ``[x, y]`` to the base of 2."""
    return product(tile.tokens, tl.trans(tokens), args.precision) * (args.scale * LOG2E)


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
    offset: tl.constexpr = 3 * 2 ** (22 - bits)
    return (gates + offset).to(tl.int32, bitcast=True) - ((301 - 2 * bits) << 22)


@triton.jit
def halves(counts, bits: tl.constexpr):
    """Two float32 of 11 bits or fewer; the first times ``2^(bits - 11)``, and the second, add up.

    Counts are as of ``whole``. The second number is in the unit of the first.
    """
    offset: tl.constexpr = 3 * 2 ** (22 - bits)
    gates = (counts + ((301 - 2 * bits) << 22)).to(tl.float32, bitcast=True) - offset
    first = (gates * 2048 + NEAREST) - NEAREST
    return first, gates * 2048 - first


@triton.jit
def joined(first, second, more, bits: tl.constexpr):
    """``more`` and the counts of which ``first`` and ``second`` are sums of ``halves``."""
    shift: tl.constexpr = bits - 11
    offset: tl.constexpr = 3 * 2 ** (22 - shift)
    high = (first + NEAREST).to(tl.int32, bitcast=True) << shift
    low = (second + offset).to(tl.int32, bitcast=True)
    # The bits of both offsets, modulo 2^32.
    extra: tl.constexpr = (301 << 22) * 2**shift + ((301 - 2 * shift) << 22)
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
def _times(values, ones, start, for_keys: tl.constexpr):
    left, right = (ones, values) if for_keys else (values, ones)
    return product(left, right, "ieee", start)


@triton.jit
def sums_after(args, added, ones, carried):
    """Sums of a tile's addends over each key and those after it, by products with 16-bit numbers.

    Args:
        added: as of ``addends``.
        ones: a ``triangle``, lower if keys are on axis 1, else upper.
        carried: what is added to all.
    """
    if args.sums.sticks:
        # Two float16 have 22 bits of a float32's 24; beyond 60000 the weight is 0 whatever is left.
        first = tl.minimum(added, 60000.0).to(tl.float16)
        second = (added - first.to(tl.float32)).to(tl.float16)
        sums = _times(second, ones, None, args.for_keys)
        sums = _times(first, ones, sums, args.for_keys) + carried
    else:
        first, second = halves(added, args.sums.bits)
        first = _times(first.to(tl.float16), ones, None, args.for_keys)
        second = _times(second.to(tl.float16), ones, None, args.for_keys)
        sums = joined(first, second, carried, args.sums.bits)
    return sums


@triton.jit
def sums_until(args, values, ones):
    """Sums of a tile's values over each key and those before it.

    Args:
        ones: a ``triangle`` in bfloat16, upper if keys are on axis 1, else lower.
    """
    sums = None
    for term in tl.static_range(args.sums.terms):
        leading = values
        if term < args.sums.terms - 1:  # the upper half of a float32 is a bfloat16
            leading = values.to(tl.int32, bitcast=True) & -65536
            leading = leading.to(tl.float32, bitcast=True)
        sums = _times(leading.to(tl.bfloat16), ones, sums, args.for_keys)
        values -= leading
    return sums


@triton.jit
def addends(args, logits, shown, masked: tl.constexpr):
    """The summands of a tile: binary softplus of logits, or gates; 0 where hidden."""
    if args.sums.sticks:
        added = softplus(logits)
    else:
        gates, _ = gates_of(logits)
        added = to_integer(gates, args.sums.bits)
    return tl.where(shown, added, 0) if masked else added


@triton.jit
def entries(args, pairs, counts):
    """Products with the vectors at counts, and how they rise with the count, both times log2(e).

    Args:
        pairs: as of ``pairs_of``, places along the axis of the queries.
        counts: at most the last pair's.
    """
    pointer, places = pairs
    places = by_query(places, args.for_keys) + (counts >> args.sums.bits)
    first, rise = load_pairs(pointer, places)
    return first + fraction(counts, args.sums.bits) * rise, rise


@triton.jit
def pairs_of(args, pairs, lane, start, length, block: tl.constexpr):
    """Pointer to the pairs of the queries from ``start`` on, and the place of each query's first.

    Those beyond their length are the last one's.
    """
    pointer = pairs + (lane.to(tl.int64) * length + start) * args.sums.width
    return pointer, tl.minimum(tl.arange(0, block), length - 1 - start) * args.sums.width


@triton.jit
def query_pairs(args, lane, start, length, block: tl.constexpr):
    """``pairs_of`` the sums' pairs; a dummy if they have none."""
    counts: tl.constexpr = not args.sums.sticks
    return pairs_of(args, args.sums.pairs, lane, start, length, block) if counts else 0


@triton.jit
def last_entries(args, pairs):
    """The term ``[queries]`` of all pairs with the highest count, times log2(e)."""
    pointer, places = pairs
    last = tl.load(pointer + places + (args.sums.width - 1))
    return last.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def self_weights(args, tile, block_y: tl.constexpr):
    """Factors ``[x]`` of the pairs of each token with itself: 0 where hidden or dropped."""
    other = tile.at - args.band.origin
    shown = (tile.at < args.x.length) & (other >= 0) & (other < args.y.length)
    if args.x.segment_ids is not None:
        x_segments = segments_of(args.x, tile.b, tile.at, shown)
        shown = shown & (x_segments == segments_of(args.y, tile.b, other, shown))
    factor = tl.where(shown, 1.0, 0.0)
    if args.dropout is not None:
        kept_factor = tl.zeros([tile.at.shape[0]], tl.float32)
        first = tl.maximum(tile.start - args.band.origin, 0)
        end = tl.maximum(tile.start - args.band.origin + tile.at.shape[0], 0)
        end = tl.minimum(end, args.y.length)
        for number in range(first // block_y, tl.cdiv(end, block_y)):
            y_at = number * block_y + tl.arange(0, block_y)
            keep = undropped(args, tile, number * block_y, block_y)
            same = keep & (y_at[None, :] == other[:, None])
            kept_factor += tl.sum(tl.where(same, args.dropout.factor, 0.0), 1)
        factor *= kept_factor
    return factor


STRIDE = tl.constexpr(4)
"""Tiles between two looks at whether all sums are at their limit."""


@triton.jit
def _descend_range(
    step: tl.constexpr, args, state, tile, more, begin, end, far: tl.constexpr,
    masked: tl.constexpr, block: tl.constexpr,
):
    """The state after tiles ``end - 1`` down to ``begin``; ``far``: all sums are at their limit."""
    for behind in range(end - begin):
        number = end - 1 - behind
        y_at = number * block + tl.arange(0, block)
        k = load_tokens(args.y.tokens, tile.b, tile.h // args.group, y_at, args.y.length)
        logits = binary_logits(args, tile, k)
        shown = visible(args, tile.b, tile.at, y_at) if masked else None
        state = step(args, state, tile, more, number, y_at, logits, shown, far, masked)
    return state


@triton.jit
def _descend(step: tl.constexpr, args, state, tile, more, ranges, block: tl.constexpr):
    """The state once all sums are at their limit, which no earlier key changes, and that tile.

    Args:
        step: a function of ``args``, a state with the sums ``carried [x]`` over the keys after a
            tile, the tile of queries, ``more``, the number of the tile of keys and its tokens, the
            logits, which are shown, ``far`` and ``masked``. It returns the state.
    """
    state = _descend_range(
        step, args, state, tile, more, ranges.edge, ranges.end, False, True, block
    )
    stop = ranges.edge
    while (stop > ranges.clear) & (tl.min(state.carried, 0) < args.sums.limit):
        first = tl.maximum(stop - STRIDE, ranges.clear)
        state = _descend_range(step, args, state, tile, more, first, stop, False, False, block)
        stop = first
    return state, stop


class _SumsState(NamedTuple):
    """Sums of a block of queries so far: ``carried [x]``, and as of ``_SoftmaxState``."""

    carried: Any
    output: Any
    row_sum: Any
    row_max: Any


@triton.jit
def _attend_tile(
    args, state, tile, more, number, y_at, logits, shown, far: tl.constexpr, masked: tl.constexpr
):
    ones, pairs = more
    carried, output = state.carried, state.output
    row_sum, row_max = state.row_sum, state.row_max
    if far:
        logits += last_entries(args, pairs)[:, None]
    else:
        added = addends(args, logits, shown, masked)
        sums = sums_after(args, added, ones, carried[:, None])  # [x, y]
        carried += tl.sum(added, 1)
        if args.sums.sticks:
            logits -= sums
        else:
            carried = at_most(carried, args.sums.limit)
            counted, _ = entries(args, pairs, at_most(sums, args.sums.limit))
            logits += counted
    if masked:
        logits = tl.where(shown, logits, float("-inf"))
    if args.sums.sticks:
        weights = tl.exp2(logits)
    else:
        weights, rescale, row_max, row_sum = softmax_step(logits, row_max, row_sum)
        output *= rescale[:, None]
    if args.dropout is not None:
        keep = undropped(args, tile, number * y_at.shape[0], y_at.shape[0])
        weights = tl.where(keep, weights * args.dropout.factor, 0.0)
    v = load_tokens(args.y.second, tile.b, tile.h // args.group, y_at, args.y.length)
    output += product(weights.to(v.dtype), v, args.precision)
    return _SumsState(carried, output, row_sum, row_max)


@triton.autotune(
    configs=SUMS_FORWARD, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def sums_forward_kernel(args, output, lse, key, block_x: tl.constexpr, block_y: tl.constexpr):
    """One block of queries of one head.

    Args:
        lse: of stick breaking, binary logarithms of what is left.
    """
    tile = query_tile(args, block_x)
    pairs = query_pairs(args, tile.lane, tile.start, args.x.length, block_x)
    more = (triangle(block_y, True), pairs)
    ranges = visible_tile_ranges(args, tile.b, tile.start, block_x, block_y)
    row_sum = tl.zeros([block_x], tl.float32)
    carried = tl.zeros([block_x], tl.float32 if args.sums.sticks else tl.int32)
    result = tl.zeros([block_x, args.y.second.block], tl.float32)
    state = _SumsState(carried, result, row_sum, row_sum - float("inf"))
    state, stop = _descend(_attend_tile, args, state, tile, more, ranges, block_y)
    begin = ranges.begin
    if args.sums.sticks:
        begin = tl.where(tl.min(state.carried, 0) < args.sums.limit, begin, ranges.clear)
    else:
        state = _descend_range(
            _attend_tile, args, state, tile, more, ranges.clear, stop, True, False, block_y
        )
    if args.edged:
        state = _descend_range(
            _attend_tile, args, state, tile, more, begin, ranges.clear, False, True, block_y
        )
    result = state.output
    if args.sums.sticks:
        row_lse = -state.carried
        if args.sums.rest_to_self:
            factor = self_weights(args, tile, block_y)
            own_at = tl.maximum(tile.at - args.band.origin, 0)
            v = load_tokens(args.y.second, tile.b, tile.h // args.group, own_at, args.y.length)
            result += (factor * tl.exp2(row_lse))[:, None] * v.to(tl.float32)
    else:
        row_sum = tl.where(state.row_sum > 0, state.row_sum, 1.0)
        result /= row_sum[:, None]
        row_lse = (state.row_max + tl.log2(row_sum)) / LOG2E
    store_tokens(output, tile.b, tile.h, result, tile.at, args.x.length)
    store_numbers(lse, tile.b, tile.h, row_lse, tile.at, args.x.length)


@triton.jit
def carried_at(args, lane, number, block_k: tl.constexpr):
    """Place in ``Carries.sums`` of the first query's sum before a tile of keys."""
    keys = args.x.length if args.for_keys else args.y.length
    queries = args.y.length if args.for_keys else args.x.length
    return (lane.to(tl.int64) * tl.cdiv(keys, block_k) + number) * queries


class _CarryState(NamedTuple):
    """The sums ``carried [x]`` over the keys after a tile."""

    carried: Any


@triton.jit
def _carry_tile(
    args, state, tile, carries, number, y_at, logits, shown, far: tl.constexpr, masked: tl.constexpr
):
    """Write the sums over the keys after a tile."""
    sums = carries.sums + carried_at(args, tile.lane, number, y_at.shape[0])
    tl.store(sums + tile.at, state.carried, mask=tile.at < args.x.length)
    carried = state.carried + tl.sum(addends(args, logits, shown, masked), 1)
    return _CarryState(carried if args.sums.sticks else at_most(carried, args.sums.limit))


@triton.autotune(
    configs=SUMS_QUERIES, key=["key"], prune_configs_by={"early_config_prune": fitting_sums}
)
@triton.jit(do_not_specialize=["key"])
def carries_kernel(args, carries, key, block_k: tl.constexpr, block_q: tl.constexpr):
    """Sums ``[lane, tile, query]`` before each tile of ``block_k`` keys, from the last on.

    ``first_tiles [lane, query]`` says from which tile on there are any; before, all sums are at
    their limit.
    """
    tile = query_tile(args, block_q)
    ranges = visible_tile_ranges(args, tile.b, tile.start, block_q, block_k)
    state = _CarryState(tl.zeros([block_q], tl.float32 if args.sums.sticks else tl.int32))
    state, stop = _descend(_carry_tile, args, state, tile, carries, ranges, block_k)
    # What is at the limit stays there: of tiles with hidden pairs no sums are needed then.
    first = tl.where(tl.min(state.carried, 0) < args.sums.limit, ranges.begin, stop)
    if args.edged:
        edge = tl.minimum(stop, tl.maximum(first, ranges.clear))
        _descend_range(_carry_tile, args, state, tile, carries, first, edge, False, True, block_k)
    first_tiles = carries.first_tiles + tile.lane.to(tl.int64) * args.x.length + tile.at
    tl.store(first_tiles, tl.zeros([block_q], tl.int32) + first, mask=tile.at < args.x.length)
