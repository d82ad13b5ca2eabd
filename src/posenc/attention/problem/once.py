"""Results that depend on positions and an encoding alone, computed once for all calls."""

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
"""Results that are kept of a pair of layouts."""


class Kept(NamedTuple):
    """A result, and what it is of beside a pair of layouts.

    Args:
        kind: what else it depends on.
        copies: of the tensors that it was computed from.
    """

    kind: Hashable
    copies: Copies
    result: Any


Known = WeakKeyDictionary[Layout, WeakKeyDictionary[Layout, list[Kept]]]
"""Results of each pair of layouts that is alive, the last ones last."""


def once_for(
    grid: Grid,
    known: Known,
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
        kind: what else it depends on.
        masked: it depends on causality, window and intervals of the grid.
        signals: it depends on those of the layouts.
    """
    query, key = grid.query, grid.key
    if not signals:
        query, key = query.without_signal, key.without_signal
    content = _content(query) if key is query else [*_content(query), *_content(key)]
    if masked:
        content.append(grid.intervals)
        kind = (kind, grid.band)
    tensors = [grid.query.positions, grid.key.positions, *(x for x in content if x is not None)]
    if is_transformed() or needs_dispatch(*tensors) or not all(map(has_values, tensors)):
        return compute(grid)
    kept = known.setdefault(query, WeakKeyDictionary()).setdefault(key, [])
    for found in kept:
        if found.kind == kind and (in_graph(grid) or found.copies.hold(content)):
            return found.result  # type: ignore[no-any-return]
    copies = Copies(content)
    with torch.inference_mode(False):
        result = compute(grid)
    kept[:] = [*kept[1 - MOST :], Kept(kind, copies, result)]
    return result


def _content(layout: Layout) -> list[Tensor | None]:
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
class _OfPart:
    """Results of a part of an encoding as it was."""

    states: ModuleStates
    known: Known = field(default_factory=WeakKeyDictionary)


_OF_PARTS: WeakKeyDictionary[Part, _OfPart] = WeakKeyDictionary()


def once_for_part(
    part: Part, grid: Grid, compute: Callable[[Grid], T], kind: tuple[Hashable, ...]
) -> T:
    """The result of ``compute`` for a part of an encoding and a grid, computed once.

    Each time for parts that can be trained or whose states cannot be compared, for positions with
    gradients and for signals, and where PyTorch traces, captures or watches what is computed.

    Args:
        kind: what else it depends on.
    """
    sides = (grid.query, grid.key)
    if (
        next(part.parameters(), None) is not None
        or in_graph(grid)
        or needs_dispatch(*part.buffers())
        or any(side.signal is not None or side.positions.requires_grad for side in sides)
    ):
        return compute(grid)
    found = _OF_PARTS.get(part)
    if found is None or not found.states.hold():
        found = _OF_PARTS[part] = _OfPart(ModuleStates(part))
    if not found.states.complete:
        return compute(grid)
    return once_for(grid, found.known, compute, kind, masked=True)
