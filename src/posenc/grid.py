"""Queries against keys: offsets, and who sees whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.display import grid_html, grid_line
from posenc.layout.integers import exact_dtype
from posenc.layout.padding import zero_invalid
from posenc.layout.pytree import register

__all__ = ["Grid", "Mask", "zero_invalid_signals"]


Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a pair is visible, from its batch row, head, query and key."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Queries against keys: the offset of every pair, and which pairs may see each other.

    Args:
        query, key: the layouts of both sides.
        causal: a query sees keys of equal or lower order only.
        window: a query sees keys fewer than ``window`` steps of order away: itself and
            ``window - 1`` before it (and as many after it unless causal).

    Raises:
        ArgumentError: on a window below 1, or layouts with different numbers of axes.
    """

    query: Layout
    key: Layout
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ArgumentError(
                "window", expected="1 or more", got=self.window, remedy="Use None for no window."
            )
        if self.query.axes != self.key.axes:
            raise ArgumentError(
                "grid",
                expected="queries and keys with equally many axes",
                got=f"{self.query.axes} and {self.key.axes}",
                remedy="Give cross-attention layouts of one kind.",
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
        """Which keys each query may see, ``[B|1, 1, Q, K]``."""
        query, key = self.query, self.key
        ahead = key.order.unsqueeze(1) - query.order.unsqueeze(2)
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.causal:
            seen = seen & (ahead <= 0)
        if self.window is not None:
            seen = seen & (ahead.abs() < self.window)
        if query.document is not None or key.document is not None:
            seen = seen & (_documents(query).unsqueeze(2) == _documents(key).unsqueeze(1))
        if key.valid is not None:
            seen = seen & key.valid.unsqueeze(1)
        if query.valid is not None:
            seen = seen & query.valid.unsqueeze(2)
        return seen.unsqueeze(1)

    def mask_mod(self) -> Mask:
        """``visible`` as FlexAttention takes it: of a batch row, head, query and key.

        For ``torch.nn.attention.flex_attention.create_block_mask(grid.mask_mod(), B, None, Q, K)``
        with B the batch rows, or None where the layouts have one row for all.
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
            seen = ahead <= 0 if causal else ahead == ahead
            if window is not None:
                seen = seen & (ahead.abs() < window)
            if documents is not None:
                seen = seen & (documents[0](b, i) == documents[1](b, j))
            if query_valid is not None:
                seen = seen & query_valid(b, i)
            if key_valid is not None:
                seen = seen & key_valid(b, j)
            return seen

        return mask

    @property
    def marked(self) -> bool:
        """Whether documents or padding hide pairs (known without reading the device)."""
        return any(
            mark is not None
            for side in (self.query, self.key)
            for mark in (side.document, side.valid)
        )

    @property
    def shift(self) -> int | None:
        """Position of the first key less that of the first query, where both sides are regular."""
        if self.query.start is None or self.key.start is None:
            return None
        return self.key.start - self.query.start

    def require_shift(self) -> int:
        """``shift`` of a grid that has to be regular.

        Raises:
            ArgumentError: where it is not.
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
        """Whether every query is known to see every key."""
        if self.marked:
            return False
        if not self.causal and self.window is None:
            return True
        if self.shift is None:
            return False
        first, last = self.shift - (self.query.length - 1), self.shift + self.key.length - 1
        reach = float("inf") if self.window is None else self.window
        return (not self.causal or last <= 0) and -reach < first and last < reach

    def line(self, *, device: torch.device | None = None) -> Int[Tensor, " offsets"]:
        """Every offset of a regular grid in ascending order, ``[Q + K - 1]`` int64.

        Pair (i, j) has the offset at index ``j - i + Q - 1``.

        Raises:
            ArgumentError: where the grid is not regular.
        """
        first = self.require_shift() - (self.query.length - 1)
        count = self.query.length + self.key.length - 1
        return torch.arange(first, first + count, device=device or self.query.device)

    def line_offsets(self, *, device: torch.device | None = None) -> Float[Tensor, " offsets"]:
        """``line`` as floating-point offsets, ``[Q + K - 1]``; float64 where they need it.

        Raises:
            ArgumentError: where the grid is not regular.
        """
        line = self.line(device=device)
        first = self.require_shift() - (self.query.length - 1)
        last = self.require_shift() + self.key.length - 1
        return line.to(exact_dtype(first, last, line.device))


register(Grid, "posenc.grid.Grid", ("query", "key"))


def zero_invalid_signals(grid: Grid) -> Grid:
    """The grid with zeros for the signals of invalid tokens; ``grid`` itself where it has none."""
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
    """Reads a tensor ``[B|1, L]`` at a batch row and a token."""
    if x.shape[0] == 1:
        only = x[0]
        return lambda b, at: only[at]
    return lambda b, at: x[b, at]
