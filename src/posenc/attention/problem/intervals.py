"""Intervals of visible keys in packed and padded batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import documents_of
from posenc.runtime import has_values


class DocumentSpan(NamedTuple):
    """A document of a row: consecutive tokens, one position and one step of order apart.

    Args:
        begin, end: from and to (exclusive) among the row's tokens.
        position, order: of the first.
    """

    begin: int
    end: int
    position: float
    order: int


Run = tuple[DocumentSpan, DocumentSpan]
"""One document of a batch row, of the queries and of the keys."""


def _runs(grid: Grid) -> dict[tuple[Run, ...], list[int]] | None:
    """Rows by their documents on both sides; None where order and position differ."""
    queries, keys = _documents(grid.query), _documents(grid.key)
    if queries is None or keys is None:
        return None
    rows_by_runs: dict[tuple[Run, ...], list[int]] = {}
    for row in range(grid.batch):
        query_documents, key_documents = queries[row % len(queries)], keys[row % len(keys)]
        runs = tuple(
            (query, key_documents[n]) for n, query in query_documents.items() if n in key_documents
        )
        for query, key in runs:
            steps = key.position - query.position
            if steps != key.order - query.order or not query.position.is_integer():
                return None
        rows_by_runs.setdefault(runs, []).append(row)
    return rows_by_runs


def _documents(layout: Layout) -> list[dict[int, DocumentSpan]] | None:
    """Documents by number, for each row of a layout of one axis; None without values."""
    if layout.axes != 1 or layout.special is not None or not has_values(layout.positions):
        return None
    rows = layout.batch
    positions = layout.positions[..., 0].detach().expand(rows, -1)
    order = layout.order.expand(rows, -1)
    document = documents_of(layout).expand(rows, -1)
    valid = torch.ones_like(order, dtype=torch.bool) if layout.valid is None else layout.valid
    valid = valid.expand(rows, -1)
    joined = (positions.diff() == 1) & (order.diff() == 1) & (document.diff() == 0)
    joined &= valid[:, 1:] & valid[:, :-1]
    by_row = []
    for row in range(rows):
        ends = (~joined[row]).nonzero().flatten().add(1).tolist()
        documents: dict[int, DocumentSpan] = {}
        for begin, end in zip([0, *ends], [*ends, layout.length], strict=True):
            if not bool(valid[row, begin]):
                continue
            number = int(document[row, begin])
            if number in documents:
                return None
            at = float(positions[row, begin])
            documents[number] = DocumentSpan(begin, end, at, int(order[row, begin]))
        by_row.append(documents)
    return by_row


def run_intervals(grid: Grid) -> Int[Tensor, "3 b Q"] | None:
    """Intervals of visible keys: first, last plus one, and the offset of key 0, for each query.

    The offset of key j is j plus the last number. A query that sees none has an empty interval.
    None where documents are in pieces, or tokens of one not one position and one step apart.
    """
    runs = _runs(grid)
    if runs is None:
        return None
    lowest, highest = grid.band
    rows, i = sum(len(members) for members in runs.values()), torch.arange(grid.query.length)
    intervals = torch.zeros(3, rows, grid.query.length, dtype=torch.int64)
    # Tokens of no document go on as if they were of their row's first, or of any row's.
    anywhere = next((_base(run, i) for documents in runs for run in documents), -i)
    visible_orders, order = grid.intervals, grid.query.order
    for documents, members in runs.items():
        intervals[2, members] = _base(documents[0], i) if documents else anywhere
        for run in documents:
            base = _base(run, i)
            query, (first, end, *_) = run
            low, high = (lowest - base).unsqueeze(0), (highest + 1 - base).unsqueeze(0)
            if visible_orders is not None:  # key j has the query's order + j + base
                first_order = order.expand(rows, -1)[members] + base
                shown = visible_orders.expand(rows, -1, -1)[members]
                low, high = (
                    low.maximum(shown[..., 0] - first_order),
                    high.minimum(shown[..., 1] - first_order),
                )
            low, high = low.clamp(first, end), high.clamp(first, end)
            here = slice(query.begin, query.end)
            part = torch.stack([low, high, base.expand_as(low)]).expand(-1, len(members), -1)
            intervals[:, members, here] = part[..., here]
    return intervals


def _base(run: Run, i: Int[Tensor, " Q"]) -> Int[Tensor, " Q"]:
    """The offset of key 0 for the queries of a run, extended beyond the run."""
    query, key = run
    return key.order - query.order - key.begin + query.begin - i
