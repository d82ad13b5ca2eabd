"""Pairs of queries and keys: offsets and visibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.checks import require_truth, require_whole
from posenc.layout.display import grid_html, grid_line
from posenc.layout.features import require_layout
from posenc.layout.integers import exact_dtype
from posenc.layout.padding import zero_invalid
from posenc.layout.pytree import register

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Visibility of a pair, from its batch row, head, query and key indices."""

FARTHEST = 2**62
"""Steps of order between any two tokens at most. Sums of it and a position fit in 64 bits."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Offset and visibility of every pair of a query and a key.

    Args:
        query, key: the layouts of both sides.
        causal: a query attends only to keys of equal or lower order.
        window: a query attends only to keys less than ``window`` away in order: itself and
            ``window - 1`` before it (and as many after it unless causal). One too wide to hide
            anything, beyond 2^62, becomes None.

    Raises:
        ArgumentError: for a window below 1, arguments of other types, or layouts with different
            numbers of axes.
    """

    query: Layout
    key: Layout
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        require_layout("query", self.query)
        require_layout("key", self.key)
        require_truth("causal", self.causal)
        if self.window is not None:
            window = require_whole("window", self.window, most=inf, remedy="Use None for none.")
            object.__setattr__(self, "window", window if window <= FARTHEST else None)
        if self.query.axes != self.key.axes:
            raise ArgumentError(
                "grid",
                expected="queries and keys with equally many axes",
                got=f"{self.query.axes} and {self.key.axes}",
                remedy="Use layouts with the same number of axes for queries and keys.",
            )

    @classmethod
    def of(cls, layout: Layout, *, causal: bool = False, window: int | None = None) -> Grid:
        """Self-attention: ``layout`` on both sides."""
        return cls(layout, layout, causal, window)

    def __repr__(self) -> str:
        return grid_line(self)

    def _repr_html_(self) -> str:
        return grid_html(self)

    @property
    def offset(self) -> Float[Tensor, "b Q K A"]:
        """Δ = key position − query position, ``[B|1, Q, K, A]``."""
        return self.key.positions.unsqueeze(1) - self.query.positions.unsqueeze(2)

    @property
    def visible(self) -> Bool[Tensor, "b 1 Q K"]:
        """True where a query may attend to a key, ``[B|1, 1, Q, K]``."""
        query, key = self.query, self.key
        ahead = key.order.unsqueeze(1) - query.order.unsqueeze(2)
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if self.causal:
            visible = visible & (ahead <= 0)
        if self.window is not None:
            visible = visible & (ahead.abs() < self.window)
        if query.document is not None or key.document is not None:
            visible = visible & (_documents(query).unsqueeze(2) == _documents(key).unsqueeze(1))
        if key.valid is not None:
            visible = visible & key.valid.unsqueeze(1)
        if query.valid is not None:
            visible = visible & query.valid.unsqueeze(2)
        return visible.unsqueeze(1)

    def mask_mod(self) -> Mask:
        """``visible`` as a FlexAttention ``mask_mod``.

        For ``torch.nn.attention.flex_attention.create_block_mask(grid.mask_mod(), B, None, Q, K)``;
        B is the batch size, or None if the layouts have one row.
        """
        query, key, causal, window = self.query, self.key, self.causal, self.window
        query_order, key_order = _reader(query.order), _reader(key.order)
        documents = None
        if query.document is not None or key.document is not None:
            documents = tuple(
                _reader(torch.zeros_like(side.order) if side.document is None else side.document)
                for side in (query, key)
            )
        query_valid, key_valid = (
            None if side.valid is None else _reader(side.valid) for side in (query, key)
        )

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            ahead = key_order(b, j) - query_order(b, i)
            visible = ahead <= 0 if causal else ahead == ahead
            if window is not None:
                visible = visible & (ahead.abs() < window)
            if documents is not None:
                visible = visible & (documents[0](b, i) == documents[1](b, j))
            if query_valid is not None:
                visible = visible & query_valid(b, i)
            if key_valid is not None:
                visible = visible & key_valid(b, j)
            return visible

        return mask

    @property
    def segmented(self) -> bool:
        """True if documents or padding may mask pairs (known without reading the device)."""
        return any(
            mark is not None
            for side in (self.query, self.key)
            for mark in (side.document, side.valid)
        )

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
        if not self.causal and self.window is None:
            return True
        if self.shift is None:
            return False
        first, last = self.shift - (self.query.length - 1), self.shift + self.key.length - 1
        limit = float("inf") if self.window is None else self.window
        return (not self.causal or last <= 0) and -limit < first and last < limit

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
        """``distinct_offsets`` as float32, or float64 where they need it.

        Raises:
            ArgumentError: for an irregular grid.
        """
        offsets = self.distinct_offsets(device=device)
        first = self.require_shift() - (self.query.length - 1)
        last = self.require_shift() + self.key.length - 1
        return offsets.to(exact_dtype(first, last, offsets.device))


register(Grid, "posenc.grid.Grid", ("query", "key"))


def zero_invalid_signals(grid: Grid) -> Grid:
    """The grid with signals of invalid tokens set to zero; ``grid`` itself without signals."""
    query, key = _zero_signal(grid.query), _zero_signal(grid.key)
    if query is grid.query and key is grid.key:
        return grid
    return replace(grid, query=query, key=query if grid.query is grid.key else key)


def _zero_signal(layout: Layout) -> Layout:
    if layout.signal is None or layout.valid is None:
        return layout
    return replace(layout, signal=zero_invalid(layout.signal, layout))


def _documents(layout: Layout) -> Tensor:
    return torch.zeros_like(layout.order) if layout.document is None else layout.document


def _reader(x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of batch row and token that indexes ``x`` ``[B|1, L]``."""
    if x.shape[0] == 1:
        row = x[0]
        return lambda b, token: row[token]
    return lambda b, token: x[b, token]
