"""Arguments of the kernels, as records. Absent ones are None.

Each kernel takes ``KernelArguments`` and where its results go. Constants are in the records, too:
Triton 3.6 forgets those of a tuple within a tuple unless a constant of its own comes after them
(``end`` is there for that), and those of a tuple that is given a name, so that kernels spell
``args.x.tokens`` out. It does not let a function return None within a tuple: what is absent of a
``Tile`` is a dummy that nobody reads. Nor does it compare a tuple that holds None with None.

Kernels have two sides. Each program computes ``block_x`` tokens of one, *x*, and loops over those
of the other, *y*, in tiles of ``block_y``. If ``for_keys``, x are the keys and y the queries.

A packed batch is one row of tokens with ``Side.segment_ids``: pairs of different segments are
hidden, and tiles without visible pairs are skipped by ``Side.summary``. A window is ``Band.first``
and ``last``, of which ``tile_ranges`` makes the bounds of the loop over tiles.

Sizes in shapes: B batch rows, H query heads, L tokens, Q queries, K keys; h is H, or 1 if shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language import constexpr

END = constexpr(True)


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
    term_low: Any = None
    term_high: Any = None
    second_low: Any = None
    second_high: Any = None
    factor: Any = None
    column: Any = None
    sinks: Any = None
    lse: Any = None
    delta: Any = None
    segment_ids: Any = None
    segment_ids_row: Any = 0
    order: Any = None
    order_row: Any = 0
    summary: Any = None
    summary_row: Any = 0
    length: Any = 0
    end: Any = END


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


class OffsetTables(NamedTuple):
    """Tables of ``count`` entries by offset: biases ``[h, count]``, and rows for the terms of x,
    for those of y, and for values; a function of numbers by offset; and the cap of the logits."""

    bias_by_offset: Any
    bias_head: Any
    x_rows: Any
    y_rows: Any
    value_rows: Any
    curve: Any
    softcap: Any
    count: Any
    end: Any = END


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


class Dropout(NamedTuple):
    """Dropout of weights: those whose drawn 32 bits are below ``threshold``, a multiple of 2^16
    (the lower half is another pair's), become 0; others are multiplied by ``factor``. ``seed`` is
    a pointer."""

    threshold: Any
    factor: Any
    seed: Any


class CarriedSums(NamedTuple):
    """Scores with sums over the keys of a row from each key on: sticks, or counts of gates.

    Args:
        pairs: of counts, as of ``entries`` in sums.py, ``width`` of them a query.
        limit: of the sums; all beyond count as it.
        sticks: stick breaking; with ``rest_to_self``, what is left goes to a query's own key.
        bits: of the fraction of a count.
        terms: numbers of 16 bits that gradients are split into where they are summed up.
    """

    pairs: Any
    limit: Any
    sticks: Any
    rest_to_self: Any
    width: Any
    bits: Any
    terms: Any


class KernelArguments(NamedTuple):
    """Attention as the kernels take it.

    Args:
        x, y: ``Side``; tables: ``OffsetTables``; band: ``Band``; dropout: ``Dropout``.
        batch, heads: batch rows and query heads; group: query heads that share a key head.
        scale: factor of q·k.
        for_keys: x are the keys.
        edged: tiles with hidden pairs come first, too.
        has_low, has_high: there may be tiles wholly at an end of the tables.
        causal: by order.
        span: side of the squares of pairs of which ``Gradients.low`` and ``high`` sum up those
            that read one entry alone. Divided by all tiles.
        summary_block: tokens that ``Side.summary`` takes together.
        precision, factor_precision: of products, and of those of low-rank factors.
        sums: ``CarriedSums``; None for scores that carry none.
        query_start: number of the first query, for dropout; None: 0.
    """

    x: Any
    y: Any
    tables: Any
    band: Any
    dropout: Any
    batch: Any
    heads: Any
    group: Any
    scale: Any
    for_keys: Any
    edged: Any
    has_low: Any
    has_high: Any
    causal: Any
    span: Any
    summary_block: Any
    precision: Any
    factor_precision: Any
    sums: Any = None
    query_start: Any = None
    end: Any = END


class Tile(NamedTuple):
    """The tile of x that a program computes, from token ``start`` on, the tokens ``at``.

    ``b`` and ``h`` are its batch row and query head, ``lane`` a number for both; ``seed`` is that
    of dropout and ``rate`` that of queries in a ``Curve``. Of tokens that are rotated, ``tokens``
    are the first members of all pairs and ``partners`` the second.
    """

    start: Any
    at: Any
    b: Any
    h: Any
    lane: Any
    seed: Any
    tokens: Any
    partners: Any
    second: Any
    term: Any
    factor: Any
    column: Any
    rate: Any
    lse: Any
    delta: Any


class OtherTile(NamedTuple):
    """Tile ``number`` of y, as of ``Tile``, counted from 0; ``head`` is that of its tokens."""

    number: Any
    start: Any
    at: Any
    head: Any
    tokens: Any
    partners: Any
    factor: Any


class TileRanges(NamedTuple):
    """Bounds of the loops over tiles of y, as of ``tile_ranges``."""

    begin: Any
    clear: Any
    low_end: Any
    high_begin: Any
    edge: Any
    end: Any


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


class DiagonalSums(NamedTuple):
    """Outputs of each program of ``offsets_kernel`` for the gradients of tables.

    Args:
        entries: ``[splits, heads, diagonals, 2 * block]``, of biases, or of the numbers of a curve.
        rows: ``[splits, heads, diagonals, 2 * block, width]``; of the term of y, or, where
            ``of_values``, of the values, whose tokens are the gradients of the outputs.
        slope, intercept: of a curve, ``[splits, heads, diagonals, 2 * curve.block]`` each.
        first: number of the first diagonal, counted in tiles of y less tiles of x.
        low_steps, high_steps: squares of ``span`` by ``span`` pairs that are at most, and at least,
            so many apart are summed up by ``gradients_kernel``, where ``has_low``, ``has_high``.
        heads: H, or 1 to sum over the heads.
    """

    entries: Any
    rows: Any
    slope: Any
    intercept: Any
    first: Any
    diagonals: Any
    low_steps: Any
    high_steps: Any
    heads: Any
    splits: Any
    width: Any
    of_values: Any


class Carries(NamedTuple):
    """Carried sums for each tile of keys, ``[lane, tile, query]``: ``sums`` over the keys after it,
    and ``d_sums``, of gradients over the keys before it. Sums exist from tile ``first_tiles [lane,
    query]`` on; before it, all are at their limit."""

    sums: Any
    d_sums: Any
    first_tiles: Any
