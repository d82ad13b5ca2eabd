"""Results that depend on positions and an encoding alone, computed once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.encoding import Part
from posenc.encoding.reuse import numbers_of
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_transformed, needs_dispatch

T = TypeVar("T")

Known = WeakKeyDictionary[Layout, WeakKeyDictionary[Layout, dict[Hashable, T]]]
"""Something of each pair of layouts that has been met, by what else it depends on."""


def once_for(
    grid: Grid,
    known: Known[T],
    compute: Callable[[Grid], T],
    kind: Hashable = None,
    *,
    signals: bool = False,
) -> T:
    """The result of ``compute`` for a grid's pair of layouts, computed once for each ``kind``.

    Its tensors can be saved for gradients, also when they were computed in inference mode.
    ``signals``: it depends on those of the layouts.
    """
    query, key = grid.query, grid.key
    if not signals:
        query, key = query.without_signal, key.without_signal
    of_query = known.setdefault(query, WeakKeyDictionary())
    found = of_query.setdefault(key, {})
    if kind not in found:
        with torch.inference_mode(False):
            found[kind] = compute(grid)
    return found[kind]


def pattern_of(grid: Grid) -> Hashable:
    """Causality, window and intervals of a grid, by value; intervals by identity."""
    return grid.band, None if grid.intervals is None else _Kept(grid.intervals)


def in_graph(grid: Grid) -> bool:
    """True while a graph is traced or captured, each of whose replays writes its tensors anew."""
    if torch.compiler.is_compiling():
        return True
    return grid.query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Kept:
    """An object by identity, kept alive, so that no later one takes its place in memory."""

    def __init__(self, x: object) -> None:
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.x is other.x


def _state(x: object) -> Hashable:
    """The value or identity of an attribute of a module; of tensors, also how often written."""
    if isinstance(x, PLAIN):
        return x
    written = isinstance(x, Tensor) and not x.is_inference()
    return _Kept(x), x._version if written else 0  # type: ignore[attr-defined]


PLAIN = (bool, int, float, str, type(None))

_OF_PARTS: WeakKeyDictionary[Part, Known[object]] = WeakKeyDictionary()


def once_for_part(
    part: Part, grid: Grid, compute: Callable[[Grid], T], kind: tuple[Hashable, ...]
) -> T:
    """The result of ``compute`` for a part of an encoding and a grid, computed once.

    Each time for parts that can be trained, for positions with gradients and for signals, and where
    PyTorch traces, captures or watches what is computed.

    Args:
        kind: what else it depends on.
    """
    buffers = list(part.buffers())
    sides = (grid.query, grid.key)
    if (
        next(part.parameters(), None) is not None
        or in_graph(grid)
        or needs_dispatch(*buffers)
        or is_transformed()
        or any(x.is_inference() for x in buffers)
        or any(side.signal is not None or side.positions.requires_grad for side in sides)
        or not all(has_values(side.positions) for side in sides)
    ):
        return compute(grid)
    state = tuple(_state(x) for module in part.modules() for x in vars(module).values())
    # Edits through ``.data`` leave no trace but in the numbers.
    state += tuple((_state(x), numbers_of(x)) for x in buffers)
    known = _OF_PARTS.setdefault(part, WeakKeyDictionary())
    return once_for(grid, known, compute, (pattern_of(grid), state, *kind))  # type: ignore[return-value]
