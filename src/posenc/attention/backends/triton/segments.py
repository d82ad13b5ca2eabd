"""Segments (documents and padding) and order as the kernels read them, token by token."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.attention.problem.once import Known, in_graph, once_for
from posenc.attention.problem.record import Segments
from posenc.attention.problem.spacing import document_numbers
from posenc.grid import Grid

GRANULE = 16
"""Tokens that are summed up together; divides all tiles."""


_NUMBERED: Known[tuple[Tensor, Tensor]] = WeakKeyDictionary()
_FOUND: tuple[Known[Segments], Known[Segments]] = (WeakKeyDictionary(), WeakKeyDictionary())


def segments_of(grid: Grid, *, ordered: bool) -> Segments:
    """Those of a grid, without orders if ``ordered``; once for each pair of layouts."""

    def compute(grid: Grid) -> Segments:
        query, key = segment_ids_of(grid)
        first, second = (
            None if ordered else side.order.contiguous() for side in (grid.query, grid.key)
        )
        return Segments(query, key, first, second, _summary(query, first), _summary(key, second))

    return compute(grid) if in_graph(grid) else once_for(grid, _FOUND[ordered], compute)


def segment_ids_of(grid: Grid) -> tuple[Tensor, Tensor]:
    """The segment of each token of each side, ``[B|1, L]``: pairs of different numbers are hidden.

    Padding has a number that no token of the other side has. As int32, which kernels compare in
    half the time, numbered once for each pair of layouts; as they are in graphs, each of whose
    replays would number them again.
    """
    if in_graph(grid):
        return _segment_ids(grid, *map(document_numbers, (grid.query, grid.key)))
    return once_for(grid, _NUMBERED, _numbered)


def _numbered(grid: Grid) -> tuple[Tensor, Tensor]:
    sides = document_numbers(grid.query), document_numbers(grid.key)
    if grid.query.document is None and grid.key.document is None:
        return _segment_ids(grid, *(side.int() for side in sides))
    rows = max(map(len, sides))
    documents = torch.cat([side.expand(rows, -1) for side in sides], dim=1)
    ascending, places = documents.sort(dim=1)
    numbers = torch.zeros_like(ascending, dtype=torch.int32)
    numbers[:, 1:] = ascending.diff(dim=1).ne(0).cumsum(1)
    numbers = numbers.gather(1, places.argsort(dim=1))
    return _segment_ids(grid, *numbers.tensor_split([grid.query.length], dim=1))


def _segment_ids(grid: Grid, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers, those of padding replaced."""
    least = torch.iinfo(query.dtype).min
    found = []
    for number, (labels, side) in enumerate(((query, grid.query), (key, grid.key))):
        if side.valid is not None:
            labels = labels.masked_fill(~side.valid, least + number)
        found.append(labels.contiguous())
    return found[0], found[1]


def _summary(segment_ids: Tensor, order: Tensor | None) -> Tensor:
    """Least and greatest order and segment of each granule of real tokens: ``[b, n, 4]``.

    The two segments of a granule with padding differ, so that it is not taken for one without.
    """
    large = 2**60
    least_label = torch.iinfo(segment_ids.dtype).min
    segment_ids = segment_ids.long()
    order = torch.zeros_like(segment_ids) if order is None else order
    rows = max(len(segment_ids), len(order))
    missing = -segment_ids.shape[1] % GRANULE
    real = torch.nn.functional.pad(segment_ids > least_label + 1, (0, missing))
    real = real.view(len(real), -1, GRANULE)
    padded = (~real).any(-1).long()
    found = []
    for values, less in ((order, 0), (segment_ids, padded)):
        each = torch.nn.functional.pad(values, (0, missing)).view(len(values), -1, GRANULE)
        least = each.masked_fill(~real, large).amin(-1) - less
        most = each.masked_fill(~real, -large).amax(-1)
        found += [least.expand(rows, -1), most.expand(rows, -1)]
    return torch.stack(found, dim=-1)
