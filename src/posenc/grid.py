"""Pairs of queries and keys: offsets and visibility."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.arguments import check
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.checks import require_tensor, require_whole
from posenc.layout.features import require_layout
from posenc.layout.fields import register
from posenc.layout.integers import exact_dtype
from posenc.layout.padding import documents_of, hidden_tokens, zero_invalid

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Visibility of a pair, from its batch row, head, query and key indices."""

FARTHEST = 2**62
"""Steps of order between any two tokens at most. Sums of it and a position fit in 64 bits."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Offset and visibility of every pair of a query and a key.

    Args:
        query, key: the layouts of both sides.
        causal: a query attends only to keys of equal or lower order. True where the window says
            so.
        window: a query attends only to keys less than ``window`` away in order: itself and
            ``window - 1`` before it (and as many after it unless causal). One too wide to hide
            anything, beyond 2^62, becomes None. Or a pair (lowest, highest), either of them None
            for no limit: ``lowest <= key order - query order <= highest``.
        intervals: ``[B|1, Q, 2]`` int64; a query attends only to keys of order from the first
            number up to, not including, the second. All four restrictions hold together.

    Raises:
        ArgumentError: for a window below 1, a pair of which the second is smaller, arguments of
            other types, or layouts with different numbers of axes.
    """

    query: Layout
    key: Layout
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    intervals: Int[Tensor, "b Q 2"] | None = None

    def __post_init__(self) -> None:
        query, key = self.query, self.key
        if not (isinstance(query, Layout) and isinstance(key, Layout)):
            require_layout("query", query)
            require_layout("key", key)
        if type(self.causal) is not bool:
            check("causal", bool, self.causal, False)
        if isinstance(self.window, (tuple, list)):
            object.__setattr__(self, "window", _checked_band(self.window))
        elif self.window is not None:
            window = require_whole("window", self.window, most=inf, remedy="Use None for none.")
            object.__setattr__(self, "window", window if window <= FARTHEST else None)
        object.__setattr__(self, "causal", self.causal or self.band[1] <= 0)
        if self.intervals is not None:
            remedy = "Give the first order that each query sees, and the last plus one."
            shape = ("B|1", self.query.length, 2)
            require_tensor("intervals", self.intervals, shape, (torch.int64,), remedy=remedy)
        if key is not query and query.axes != key.axes:
            raise ArgumentError(
                "grid",
                expected="queries and keys with equally many axes",
                got=f"{query.axes} and {key.axes}",
                remedy="Use layouts with the same number of axes for queries and keys.",
            )

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
    ) -> Grid:
        """Self-attention: ``layout`` on both sides."""
        return cls(layout, layout, causal, window)

    def chunked(self, size: int) -> Grid:
        """The grid in which keys of another chunk of ``size`` orders are hidden, as in Llama 4."""
        require_whole("size", size)
        order = self.query.order
        first = order - order.remainder(size)
        return self.within(torch.stack([first, first + size], dim=-1))

    def within(self, intervals: Int[Tensor, "b Q 2"]) -> Grid:
        """The grid in which keys outside of ``intervals`` are hidden too."""
        if self.intervals is not None:
            (low, high), (first, end) = self.intervals.unbind(-1), intervals.unbind(-1)
            intervals = torch.stack([low.maximum(first), high.minimum(end)], dim=-1)
        return replace(self, intervals=intervals)

    def with_blocks(self, blocks: Int[Tensor, "b Q"]) -> Grid:
        """The grid in which blocks of neighbouring queries also see their own block whole.

        As images in Gemma 3 and the prefix in PaliGemma do, also where ``causal`` and ``window``
        would hide keys.

        Args:
            blocks: ``[B|1, Q]`` int64, equal numbers from 0 on for neighbours in one block; -1 for
                a token of none.

        Raises:
            ArgumentError: for numbers of another shape or dtype, or a grid that has intervals, or
                of whose windows queries are more than a step away.
        """
        shape, remedy = ("B|1", self.query.length), "Number the blocks of all queries."
        require_tensor("blocks", blocks, shape, (torch.int64,), remedy=remedy)
        lowest, highest = self.band
        if self.intervals is not None or lowest > 1 or highest < -1:
            raise ArgumentError(
                "grid",
                expected="a window about each query, and no intervals",
                got=self,
                remedy="Give Grid the intervals of keys that each query sees.",
            )
        order = self.query.order.expand(max(len(blocks), self.query.order.shape[0]), -1)
        begins = torch.ones_like(order, dtype=torch.bool)
        begins[:, 1:] = (blocks.diff() != 0) | (blocks[:, 1:] < 0)
        number = begins.cumsum(1) - 1
        first = order.scatter_reduce(1, number, order, "amin", include_self=False)
        last = order.scatter_reduce(1, number, order, "amax", include_self=False)
        low = (order + lowest).minimum(first.gather(1, number))
        high = (order + highest).maximum(last.gather(1, number))
        ends = torch.stack([low, high + 1], dim=-1)
        return replace(self, causal=False, window=None, intervals=ends)

    @property
    def band(self) -> tuple[int, int]:
        """Least and greatest key order − query order that ``causal`` and ``window`` let through.

        ±2^62 where there is no limit.
        """
        if isinstance(self.window, tuple):
            lowest, highest = self.window
            low = -FARTHEST if lowest is None else lowest
            high = FARTHEST if highest is None else highest
        else:
            high = FARTHEST if self.window is None else self.window - 1
            low = -high
        return low, min(high, 0) if self.causal else high

    @property
    def batch(self) -> int:
        """Number of rows; 1 if all rows are the same."""
        of_intervals = 1 if self.intervals is None else self.intervals.shape[0]
        return max(self.query.batch, self.key.batch, of_intervals)

    def in_precision_of(self, x: Tensor) -> Grid:
        """The grid with float64 positions beside float64 features, else itself."""
        query, key = self.query.in_precision_of(x), self.key.in_precision_of(x)
        if query is self.query and key is self.key:
            return self
        return replace(self, query=query, key=query if self.query is self.key else key)

    def slice(self, begin: int, end: int) -> Grid:
        """The grid of the queries ``begin`` to ``end`` (exclusive) and all keys."""
        intervals = None if self.intervals is None else self.intervals[:, begin:end]
        return replace(self, query=self.query.slice(begin, end), intervals=intervals)

    def __repr__(self) -> str:
        same = self.query is self.key
        sides = f"of({self.query}" if same else f"query={self.query}, key={self.key}"
        window = "" if self.window is None else f", window={self.window}"
        intervals = "" if self.intervals is None else ", intervals=…"
        return f"Grid{'.' if same else '('}{sides}, causal={self.causal}{window}{intervals})"

    @property
    def offset(self) -> Float[Tensor, "b Q K A"]:
        """Δ = key position − query position, ``[B|1, Q, K, A]``, each axis in one piece."""
        key, query = (x.positions.movedim(-1, 0).contiguous() for x in (self.key, self.query))
        return (key.unsqueeze(-2) - query.unsqueeze(-1)).movedim(0, -1)

    @property
    def visible(self) -> Bool[Tensor, "b 1 Q K"]:
        """True where a query may attend to a key, ``[B|1, 1, Q, K]``."""
        query, key = self._fields()
        of_queries = [None if x is None else x.unsqueeze(2) for x in query]  # [b, Q, 1]
        of_keys = [None if x is None else x.unsqueeze(1) for x in key]  # [b, 1, K]
        return _visible(self.band, of_queries, of_keys).unsqueeze(1)

    def mask_mod(self) -> Mask:
        """``visible`` as a FlexAttention ``mask_mod``.

        For ``torch.nn.attention.flex_attention.create_block_mask(grid.mask_mod(), B, None, Q, K)``;
        B is the batch size, or None if the layouts have one row.
        """
        band = self.band
        query, key = ([None if x is None else _reader(x) for x in side] for side in self._fields())

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            of_query = [None if read is None else read(b, i) for read in query]
            return _visible(band, of_query, [None if read is None else read(b, j) for read in key])

        return mask

    def _fields(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Orders, documents, validity (and ends of intervals) of queries and of keys, ``[b, L]``.

        None where it hides no pair.
        """
        query, key = self.query, self.key
        documents: list[Tensor | None] = [None, None]
        if query.document is not None or key.document is not None:
            documents = [documents_of(query), documents_of(key)]
        ends = [None, None] if self.intervals is None else self.intervals.unbind(-1)
        of_query = [query.order, documents[0], query.valid, *ends]
        return of_query, [key.order, documents[1], key.valid]

    @property
    def segmented(self) -> bool:
        """True if documents, padding or intervals may mask pairs (the device is not read)."""
        query, key = self.query, self.key
        documents = query.document is not None or key.document is not None
        padding = query.valid is not None or key.valid is not None
        return self.intervals is not None or documents or padding

    @property
    def shift(self) -> int | None:
        """First key position minus first query position; None unless both layouts are regular."""
        if self.query.start is None or self.key.start is None:
            return None
        return self.key.start - self.query.start

    def require_shift(self) -> int:
        """``shift`` of a regular grid.

        Raises:
            ArgumentError: for an irregular grid.
        """
        if self.shift is None:
            raise ArgumentError(
                "grid",
                expected="regular layouts on both sides",
                got="an irregular one",
                remedy="Use Grid.offset, or layouts from Layout.sequence.",
            )
        return self.shift

    @property
    def dense(self) -> bool:
        """True if every query is known to attend to every key."""
        if self.segmented:
            return False
        lowest, highest = self.band
        if lowest == -FARTHEST and highest == FARTHEST:
            return True
        if self.shift is None:
            return False
        first, last = self.shift - (self.query.length - 1), self.shift + self.key.length - 1
        return lowest <= first and last <= highest

    def distinct_offsets(self, *, device: torch.device | None = None) -> Int[Tensor, " offsets"]:
        """Every offset of a regular grid in ascending order, ``[Q + K - 1]`` int64.

        Pair (i, j) has the offset at index ``j - i + Q - 1``.

        Raises:
            ArgumentError: for an irregular grid.
        """
        first = self.require_shift() - (self.query.length - 1)
        count = self.query.length + self.key.length - 1
        return torch.arange(first, first + count, device=device or self.query.device)

    def float_offsets(self, *, device: torch.device | None = None) -> Float[Tensor, " offsets"]:
        """``distinct_offsets`` as float32, or float64 where they need it or positions are.

        Raises:
            ArgumentError: for an irregular grid.
        """
        offsets = self.distinct_offsets(device=device)
        first = self.require_shift() - (self.query.length - 1)
        last = self.require_shift() + self.key.length - 1
        exact = exact_dtype(first, last, offsets.device)
        return offsets.to(torch.promote_types(exact, self.query.positions.dtype))


register(Grid, "posenc.grid.Grid", ("query", "key", "intervals"))


def _visible(
    band: tuple[int, int], query: Sequence[Any], key: Sequence[Any]
) -> Bool[Tensor, "*pairs"]:
    """Visibility of pairs, from the fields of their queries and keys."""
    (lowest, highest), (order, document, valid, first, end) = band, query
    key_order, key_document, key_valid = key
    ahead = key_order - order
    visible: Tensor = ahead <= highest if highest < FARTHEST else ahead == ahead
    if lowest > -FARTHEST:
        visible = visible & (ahead >= lowest)
    if first is not None:
        visible = visible & (key_order >= first) & (key_order < end)
    if document is not None:
        visible = visible & (document == key_document)
    if key_valid is not None:
        visible = visible & key_valid
    return visible if valid is None else visible & valid


def usable_signals(grid: Grid) -> Grid:
    """The grid with signals of invalid tokens set to zero; ``grid`` itself without signals.

    Signals that were made in inference mode are copied outside, so that autograd can save them.
    """
    query, key = _usable_signal(grid.query), _usable_signal(grid.key)
    if query is grid.query and key is grid.key:
        return grid
    return replace(grid, query=query, key=query if grid.query is grid.key else key)


def _usable_signal(layout: Layout) -> Layout:
    signal = layout.signal
    if signal is None:
        return layout
    if not torch.compiler.is_compiling() and signal.is_inference() and torch.is_grad_enabled():
        signal = signal.clone()
    if layout.valid is not None:
        signal = zero_invalid(signal, layout)
    return layout if signal is layout.signal else layout.with_signal(signal)


def seen_lengths(grid: Grid) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b k"]]:
    """Length of each query's and each key's row, as the largest key position + 1.

    Documents count separately; padding and special tokens do not count, future keys do.
    ``[B|1, Q|1]`` and ``[B|1, K|1]``; −∞ without keys.
    """
    query, key = grid.query, grid.key
    positions = _counted(key)
    if query.document is None and key.document is None:
        longest = positions.amax(dim=1, keepdim=True) + 1
        return longest, longest
    rows = max(
        positions.shape[0], *(d.shape[0] for d in (query.document, key.document) if d is not None)
    )
    positions = positions.expand(rows, -1)
    documents = documents_of(key).expand(rows, -1).contiguous()
    ordered, order = documents.sort(dim=1)
    begins = torch.zeros_like(ordered)
    begins[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    group = begins.cumsum(1)
    longest = torch.full_like(positions, -inf)
    longest = longest.scatter_reduce(1, group, positions.gather(1, order), "amax") + 1

    def of(wanted: Int[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        wanted = wanted.expand(rows, -1).contiguous()
        at = torch.searchsorted(ordered, wanted).clamp(max=ordered.shape[1] - 1)
        present = ordered.gather(1, at) == wanted
        return longest.gather(1, group.gather(1, at)).masked_fill(~present, -inf)

    return of(documents_of(query)), of(documents)


def _counted(layout: Layout) -> Float[Tensor, "b L"]:
    """Positions, −∞ for padding and special tokens."""
    positions, hidden = layout.positions[..., 0], hidden_tokens(layout)
    return positions if hidden is None else positions.masked_fill(hidden, -inf)


def _reader(x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of batch row and token that indexes ``x`` ``[B|1, L]``."""
    if x.shape[0] == 1:
        row = x[0]
        return lambda b, token: row[token]
    return lambda b, token: x[b, token]


def _checked_band(window: Sequence[int | None]) -> tuple[int | None, int | None] | None:
    """A pair of limits, None for those that limit nothing; None without limits.

    Raises:
        ArgumentError: if it is no such pair.
    """
    limits = [
        None
        if limit is None
        else require_whole("window", limit, -FARTHEST, most=inf, remedy="Use None for no limit.")
        for limit in window
    ]
    if len(limits) != 2 or (None not in limits and limits[0] > limits[1]):  # type: ignore[operator]
        raise ArgumentError(
            "window",
            expected="a number, or the least and the greatest key order - query order",
            got=window,
            remedy="Write (-128, 0) for 128 keys before each query and its own.",
        )
    low = limits[0] if limits[0] is None or limits[0] > -FARTHEST else None
    high = limits[1] if limits[1] is None or limits[1] < FARTHEST else None
    return None if low is None and high is None else (low, high)
