"""What kernels are given, bundled. Absent things are None.

Kernels know two sides. Each program owns ``block_x`` tokens of one, *x*, and walks over those of
the other, *y*, in tiles of ``block_y``. Where ``flip``, x are the keys and y the queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "Dropout",
    "Gradients",
    "Numbers",
    "Own",
    "Place",
    "Side",
    "Sizes",
    "Table",
    "Tables",
    "Tokens",
    "Turn",
]


class Tokens(NamedTuple):
    """Vectors of tokens, ``[B, H, L, width]``, features next to each other.

    ``row``, ``head`` and ``step`` are the strides of the other axes; ``block`` is ``width``
    rounded up to a power of two.
    """

    pointer: Any
    row: Any
    head: Any
    step: Any
    width: Any
    block: Any


class Turn(NamedTuple):
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
    """A number a token, ``[B, H, L]``, tokens next to each other."""

    pointer: Any
    row: Any
    head: Any


class Table(NamedTuple):
    """Rows by entry, ``[h, count, width]``; ``head`` is 0 where the heads share them."""

    pointer: Any
    head: Any
    width: Any
    block: Any


class Side(NamedTuple):
    """Everything about the tokens of one side.

    ``tokens`` are queries or keys, ``second`` values or the gradients of outputs; ``turn`` is what
    is to be done to ``tokens`` as they are read. ``term`` is
    multiplied with rows by entry; ``term_low`` and ``term_high`` are its products with the rows at
    both ends, and ``second_low`` and ``second_high`` those of ``second`` with the values'.
    ``factor`` holds low-rank columns, ``column`` a number for the logits of each key. ``total`` and
    ``inner`` are what the gradients need of the queries. Pairs with different ``label`` are
    hidden; ``order`` says who is ahead; ``summary`` has the least and greatest order and label of
    each granule of tokens. The last three have a stride of their own from batch row to batch row.
    """

    tokens: Any
    turn: Any
    second: Any
    term: Any
    term_low: Any
    term_high: Any
    second_low: Any
    second_high: Any
    factor: Any
    column: Any
    total: Any
    inner: Any
    label: Any
    label_row: Any
    order: Any
    order_row: Any
    summary: Any
    summary_row: Any
    length: Any


class Tables(NamedTuple):
    """What depends on the offset, by ``count`` entries: the line, and rows for the terms of x, for
    those of y, and for values."""

    line: Any
    line_head: Any
    x: Any
    y: Any
    value: Any
    count: Any


class Place(NamedTuple):
    """Pairs stand at ``t = y - x + origin``; they are visible from ``first`` to ``last``.

    Up to ``low`` and from ``high`` on, all read the same entry. ``window`` counts steps of order.
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
    """Of weights."""

    probability: Any
    seed: Any


class Own(NamedTuple):
    """What a program holds of its tokens of x, from token ``start`` on.

    ``b`` and ``h`` are its batch row and query head, ``lane`` a number for both. Of tokens that
    are turned, ``tokens`` are the first members of all pairs and ``partners`` the second.
    """

    tokens: Any
    partners: Any
    second: Any
    term: Any
    factor: Any
    column: Any
    total: Any
    inner: Any
    start: Any
    b: Any
    h: Any
    lane: Any


class Gradients(NamedTuple):
    """Where those of one side go. ``low`` and ``high``: sums of the logits' gradients over all
    pairs at both ends of the tables, a token; ``weight_low`` and ``weight_high``: of the weights.
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
