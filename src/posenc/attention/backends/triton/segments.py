"""Documents, padding and orders, token by token, as the kernels read them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from posenc.attention.problem.record import SegmentMask
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid
from posenc.layout.padding import documents_of

SUMMARY_BLOCK = 16
"""Tokens of a block whose visibility is summarised; divides all tiles."""


def segment_mask_of(grid: Grid, *, ordered: bool) -> SegmentMask:
    """Segments of a grid, without orders if ``ordered``; computed once per pair of layouts."""
    if ordered and not grid.segmented:
        return SegmentMask()

    def compute(grid: Grid) -> SegmentMask:
        query, key = segment_ids_of(grid)
        first, second = (
            None if ordered else side.order.contiguous() for side in (grid.query, grid.key)
        )
        return SegmentMask(query, key, first, second, _summary(query, first), _summary(key, second))

    segments = (
        compute(grid)
        if in_graph(grid)
        else reused_of_grid(compute, "segments", ordered, grid=grid, masked=False)
    )
    if ordered:
        return segments
    assert not isinstance(grid.window, tuple)  # refused by kernel_form
    return replace(segments, causal=grid.causal, window=grid.window or 0)


def segment_ids_of(grid: Grid) -> tuple[Tensor, Tensor]:
    """The segment of each token of each side, ``[B|1, L]``: pairs of different numbers are hidden.

    Padding has a number that no token of the other side has. As int32, which kernels compare in
    half the time, numbered once for each pair of layouts; as they are in graphs, each of whose
    replays would number them again.
    """
    if in_graph(grid):
        return _segment_ids(grid, *map(documents_of, (grid.query, grid.key)))
    return reused_of_grid(_number_segments, "segment ids", grid=grid, masked=False)


def in_graph(grid: Grid) -> bool:
    """True while a graph is traced or captured, each of whose replays writes its tensors anew."""
    if torch.compiler.is_compiling():
        return True
    return grid.query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _number_segments(grid: Grid) -> tuple[Tensor, Tensor]:
    sides = documents_of(grid.query), documents_of(grid.key)
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
    """Replace the segment numbers of padding, by others for queries than for keys."""
    least = torch.iinfo(query.dtype).min
    numbered = []
    for number, (labels, side) in enumerate(((query, grid.query), (key, grid.key))):
        if side.valid is not None:
            labels = labels.masked_fill(~side.valid, least + number)
        numbered.append(labels.contiguous())
    return numbered[0], numbered[1]


def _summary(segment_ids: Tensor, order: Tensor | None) -> Tensor:
    """Least and greatest order and segment of the real tokens of each block: ``[b, n, 4]``.

    The two segments of a block with padding differ, so that it is not taken for one without.
    """
    large = 2**60
    least_label = torch.iinfo(segment_ids.dtype).min
    segment_ids = segment_ids.long()
    order = torch.zeros_like(segment_ids) if order is None else order
    rows = max(len(segment_ids), len(order))
    missing = -segment_ids.shape[1] % SUMMARY_BLOCK
    real = torch.nn.functional.pad(segment_ids > least_label + 1, (0, missing))
    real = real.view(len(real), -1, SUMMARY_BLOCK)
    padded = (~real).any(-1).long()
    columns = []
    for values, less in ((order, 0), (segment_ids, padded)):
        each = torch.nn.functional.pad(values, (0, missing)).view(len(values), -1, SUMMARY_BLOCK)
        least = each.masked_fill(~real, large).amin(-1) - less
        most = each.masked_fill(~real, -large).amax(-1)
        columns += [least.expand(rows, -1), most.expand(rows, -1)]
    return torch.stack(columns, dim=-1)
