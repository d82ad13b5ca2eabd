"""Arguments of the kernels, bundled. Absent ones are None.

Triton 3.6 forgets the constants of tuples within a tuple unless a constant of its own comes after
them: ``end`` is there for that. Nor does it let a function return None within a tuple, so that
each kernel reads its tile of x (``XTile``) itself.

Kernels have two sides. Each program computes ``block_x`` tokens of one, *x*, and loops over those
of the other, *y*, in tiles of ``block_y``. If ``for_keys``, x are the keys and y the queries.

A packed batch is one row of tokens with ``Side.segment_ids``: pairs of different segments are
hidden, and tiles without visible pairs are skipped by ``Side.summary``. A window is ``Band.first``
and ``last``, of which ``tile_ranges`` makes the bounds of the loop over tiles.

Sizes in shapes: B batch rows, H query heads, L tokens, Q queries, K keys; h is H, or 1 if shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "Band",
    "Carries",
    "Curve",
    "CurveGradients",
    "Dropout",
    "Gradients",
    "Numbers",
    "OffsetTables",
    "RotaryArguments",
    "Side",
    "Sizes",
    "SumGradients",
    "TableArguments",
    "TokenArguments",
    "XTile",
]


class TokenArguments(NamedTuple):
    """Vectors of tokens, ``[B, H, L, width]``, contiguous features.

    ``row``, ``head`` and ``step`` are the strides of the other axes; ``block`` is ``width``
    rounded up to a power of two.
    """

    pointer: Any
    row: Any
    head: Any
    step: Any
    width: Any
    block: Any


class RotaryArguments(NamedTuple):
    """Factors of pairs of features, ``[B, H, L, 2 * pairs]``, cosines and then sines.

    Strides are 0 along axes that share them. ``half`` is how many pairs there would be if all
    features had a partner, and ``block`` that rounded up to a power of two.
    """

    pointer: Any
    row: Any
    head: Any
    step: Any
    pairs: Any
    half: Any
    block: Any
    adjacent: Any


class Numbers(NamedTuple):
    """One number per token, ``[B, H, L]``, contiguous tokens."""

    pointer: Any
    row: Any
    head: Any


class TableArguments(NamedTuple):
    """Rows by entry, ``[h, count, width]``; ``head`` is 0 where the heads share them."""

    pointer: Any
    head: Any
    width: Any
    block: Any


class Side(NamedTuple):
    """The tokens of one side, and what depends on one token each.

    Args:
        tokens: queries or keys; second: dO beside queries, values beside keys.
        rotary: rotates ``tokens`` as they are read.
        term: multiplied with rows by entry (of keys: DeBERTa's p2c); term_low, term_high: its
            products with the rows at both ends; second_low, second_high: those of ``second`` with
            the values' rows.
        factor: columns of a low-rank bias; column: a bias by key.
        sinks: of the queries, logits without a value.
        lse, delta: of the queries, for the gradients; delta is dO · O - dlse.
        segment_ids: pairs of different ones are hidden; order: decides what is ahead; summary:
            least and greatest order and segment of each summary block. Each has its stride between
            batch rows.
        length: number of tokens.
    """

    tokens: Any
    rotary: Any
    second: Any
    term: Any
    term_low: Any
    term_high: Any
    second_low: Any
    second_high: Any
    factor: Any
    column: Any
    sinks: Any
    lse: Any
    delta: Any
    segment_ids: Any
    segment_ids_row: Any
    order: Any
    order_row: Any
    summary: Any
    summary_row: Any
    length: Any
    end: Any


class Curve(NamedTuple):
    """A piecewise-linear function of ``numbers [count]``, by offset, times ``rates [b, Q]``.

    Of an argument u it is ``slope[h, m] * u + intercept[h, m]`` in head h, if m ``knots`` are at
    most u. There are m = 0 … ``pieces`` - 1, and knots as many as ``block``, infinite ones last.
    Numbers never fall from entry ``zero`` on, to either side. ``extremes [b, 2,
    summary_blocks]``: least and largest rate of each block of ``summary_block`` queries.
    """

    numbers: Any
    rates: Any
    rates_row: Any
    extremes: Any
    extremes_row: Any
    summary_blocks: Any
    knots: Any
    slope: Any
    intercept: Any
    zero: Any
    pieces: Any
    block: Any
    summary_block: Any
    end: Any


class OffsetTables(NamedTuple):
    """Tables of ``count`` entries by offset: biases ``[h, count]``, and rows for the terms of x,
    for those of y, and for values; a function of numbers by offset; and the cap of the logits."""

    bias_by_offset: Any
    bias_head: Any
    x: Any
    y: Any
    value: Any
    curve: Any
    softcap: Any
    count: Any
    end: Any


class Band(NamedTuple):
    """Pairs lie on diagonal ``t = y - x + origin``; from ``first`` to ``last`` they may be visible.

    Causality and windows of tokens in order are in ``first`` and ``last``. Up to ``low`` and from
    ``high`` on, all read the same entry. ``window`` is that of tokens with an order of their own,
    in steps of it.
    """

    origin: Any
    first: Any
    last: Any
    low: Any
    high: Any
    window: Any


class Sizes(NamedTuple):
    """Batch rows, query heads, and how many of them share a key head."""

    batch: Any
    heads: Any
    group: Any


class Dropout(NamedTuple):
    """Dropout of weights: those whose drawn 32 bits are below ``threshold``, a multiple of 2^16
    (the lower half is another pair's), become 0; others are multiplied by ``factor``. ``seed`` is
    a pointer until it is read."""

    threshold: Any
    factor: Any
    seed: Any


class XTile(NamedTuple):
    """The tile of x that a program computes, from token ``start`` on.

    ``b`` and ``h`` are its batch row and query head, ``lane`` a number for both; ``rate`` is that
    of queries in a ``Curve``. Of tokens that are rotated, ``tokens`` are the first members of all
    pairs and ``partners`` the second.
    """

    tokens: Any
    partners: Any
    second: Any
    term: Any
    factor: Any
    column: Any
    rate: Any
    lse: Any
    delta: Any
    start: Any
    b: Any
    h: Any
    lane: Any


class Gradients(NamedTuple):
    """Outputs for the gradients of one side. ``low`` and ``high``: sums of ds over the squares
    of pairs that read the low or the high entry alone, a token; ``weight_low`` and
    ``weight_high``: of the weights.
    """

    tokens: Any
    second: Any
    term: Any
    factor: Any
    column: Any
    low: Any
    high: Any
    weight_low: Any
    weight_high: Any
    rate: Any


class CurveGradients(NamedTuple):
    """Outputs of each program for the gradients of a ``Curve``, ``[programs, 2 * block]``."""

    slope: Any
    intercept: Any


class Carries(NamedTuple):
    """Carried sums for each tile of keys, ``[lane, tile, query]``: ``sums`` over the keys after it,
    and ``d_sums``, of gradients over the keys before it. Sums exist from tile ``first_tiles [lane,
    query]`` on; before it, all are at their limit."""

    sums: Any
    d_sums: Any
    first_tiles: Any


class SumGradients(NamedTuple):
    """Outputs for the gradients of queries. Of contextual positions also ``ends [lane, query, n]``,
    pairs: sums of the gradients of logits with counts of at least n, and of their fractions'
    shares; and sums of those at the limit that are not in either, ``far [lane, query]``."""

    tokens: Any
    ends: Any
    far: Any
