"""Caches of results that depend on layouts and on a part of an encoding only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.encoding import Part
from posenc.encoding.reuse import Copies, ModuleStates
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_transformed, needs_dispatch

T = TypeVar("T")

MOST = 8
"""Largest number of results cached per pair of layouts."""


class CachedResult(NamedTuple):
    """A cached result for a pair of layouts.

    Args:
        kind: further values that the result depends on.
        copies: copies of the tensors that it was computed from.
    """

    kind: Hashable
    copies: Copies
    result: Any


GridCache = WeakKeyDictionary[Layout, WeakKeyDictionary[Layout, list[CachedResult]]]
"""Cached results by pair of layouts, the newest last; an entry lives as long as its layouts."""


def cached_for_grid(
    grid: Grid,
    cache: GridCache,
    compute: Callable[[Grid], T],
    kind: Hashable = None,
    *,
    masked: bool = False,
    signals: bool = False,
) -> T:
    """The result of ``compute`` for a grid, kept while its layouts live and hold the same numbers.

    Layouts with a ``start`` are compared by it, others bit by bit at each call, which waits for
    devices other than the CPU. While a graph is captured, whose
    replays read no numbers anew, a result is taken as it is. Each time for tensors without values,
    and where PyTorch watches or transforms what is computed.

    Its tensors can be saved for gradients, also when they were computed in inference mode.

    Args:
        cache: where results are stored.
        kind: further values that the result depends on.
        masked: True if it depends on causality, window and intervals of the grid.
        signals: True if it depends on the signals of the layouts.
    """
    query, key = grid.query, grid.key
    if not signals:
        query, key = query.without_signal, key.without_signal
    content = (
        _compared_tensors(query)
        if key is query
        else [*_compared_tensors(query), *_compared_tensors(key)]
    )
    if masked:
        content.append(grid.intervals)
        kind = (kind, grid.band)
    tensors = [grid.query.positions, grid.key.positions, *(x for x in content if x is not None)]
    if is_transformed() or needs_dispatch(*tensors) or not all(map(has_values, tensors)):
        return compute(grid)
    results = cache.setdefault(query, WeakKeyDictionary()).setdefault(key, [])
    for cached in results:
        if cached.kind == kind and (in_graph(grid) or cached.copies.hold(content)):
            return cached.result  # type: ignore[no-any-return]
    copies = Copies(content)
    with torch.inference_mode(False):
        result = compute(grid)
    results[:] = [*results[1 - MOST :], CachedResult(kind, copies, result)]
    return result


def _compared_tensors(layout: Layout) -> list[Tensor | None]:
    """Tensors of a layout that decide if a stored result is still valid."""
    regular = layout.start is not None
    places = [] if regular else [layout.positions, layout.order]
    return [*places, layout.document, layout.valid, layout.special, layout.signal]


def in_graph(grid: Grid) -> bool:
    """True while a graph is traced or captured, each of whose replays writes its tensors anew."""
    if torch.compiler.is_compiling():
        return True
    return grid.query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False)
class _PartCache:
    """Cached results of a part of an encoding, valid for the recorded states."""

    states: ModuleStates
    cache: GridCache = field(default_factory=WeakKeyDictionary)


_PART_CACHES: WeakKeyDictionary[Part, _PartCache] = WeakKeyDictionary()


def cached_for_part(
    part: Part, grid: Grid, compute: Callable[[Grid], T], kind: tuple[Hashable, ...]
) -> T:
    """The result of ``compute`` for a part of an encoding and a grid, computed once.

    Each time for parts that can be trained or whose states cannot be compared, for positions with
    gradients and for signals, and where PyTorch traces, captures or watches what is computed.

    Args:
        kind: further values that the result depends on.
    """
    sides = (grid.query, grid.key)
    if (
        next(part.parameters(), None) is not None
        or in_graph(grid)
        or needs_dispatch(*part.buffers())
        or any(side.signal is not None or side.positions.requires_grad for side in sides)
    ):
        return compute(grid)
    part_cache = _PART_CACHES.get(part)
    if part_cache is None or not part_cache.states.hold():
        part_cache = _PART_CACHES[part] = _PartCache(ModuleStates(part))
    if not part_cache.states.complete:
        return compute(grid)
    return cached_for_grid(grid, part_cache.cache, compute, kind, masked=True)
