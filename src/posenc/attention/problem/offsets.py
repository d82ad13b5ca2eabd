"""Offsets of the pairs of a grid, and the spacing of the tokens of its documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.attention.problem.record import Geometry
from posenc.encoding.prepared import reused_of_grid
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


MOST = 2**16
"""Offsets between the tokens of documents that are always tabulated; more if there are as many
tokens."""


@dataclass(frozen=True, eq=False)
class Offsets:
    """Offsets of the pairs of a grid.

    Args:
        domain: smallest and largest offset of a visible pair; any, where there is none.
        reach: smallest and largest offset of any pair.
        shift: first key position less first query position of a regular grid; 0 for others.
        band: smallest and largest offset that a regular grid shows; nothing where the first is
            larger. Not read for others.
        intervals: of other grids, see ``run_intervals``.
    """

    domain: tuple[int, int]
    reach: tuple[int, int]
    shift: int = 0
    band: tuple[int, int] = (0, 0)
    intervals: Int[Tensor, "3 b Q"] | None = None

    @classmethod
    def of(cls, grid: Grid) -> Offsets | str:
        """Offsets of a grid whose documents are contiguous, or the reason why it has none.

        Reads the values of layouts with documents or padding.
        """
        shift = grid.shift
        if shift is not None and not grid.segmented:
            return cls.shifted(grid, shift)
        if torch.compiler.is_compiling():
            marks = (x for side in (grid.query, grid.key) for x in (side.document, side.valid))
            if shift is None or any(mark is not None for mark in marks):
                return "inside a compiled graph it takes regular layouts only"
            return cls._in_intervals(grid)
        return reused_of_grid(cls._of_documents, "offsets", grid=grid)

    @classmethod
    def _in_intervals(cls, grid: Grid) -> Offsets:
        """Offsets of a regular grid with intervals, whose values are not read."""
        assert grid.intervals is not None
        assert grid.key.start is not None
        regular, (lowest, highest) = cls.regular(grid), grid.band
        base = grid.require_shift() - torch.arange(grid.query.length, device=grid.query.device)
        first, end = (grid.intervals - grid.key.start).unbind(-1)
        low, high = (lowest - base).maximum(first), (highest + 1 - base).minimum(end)
        ends = (x.clamp(0, grid.key.length) for x in (low, high))
        intervals = torch.stack([*ends, base.expand_as(low)])
        return replace(regular, shift=0, band=(0, 0), intervals=intervals)

    @classmethod
    def _of_documents(cls, grid: Grid) -> Offsets | str:
        intervals = run_intervals(grid)
        if intervals is None:
            return "its tokens are not whole stretches of consecutive positions"
        offsets = cls.of_intervals(intervals, grid.key.length)
        width = offsets.reach[1] - offsets.reach[0]
        if width >= max(MOST, 4 * (grid.query.length + grid.key.length)):
            return "its documents are too far apart for tables of their offsets"
        return offsets

    @classmethod
    def regular(cls, grid: Grid) -> Offsets:
        """Offsets of a regular grid."""
        return cls.shifted(grid, grid.require_shift())

    @classmethod
    def shifted(cls, grid: Grid, shift: int, *, masked: bool = True) -> Offsets:
        """Offsets of a grid whose visible pairs have the offset ``j - i + shift``.

        Args:
            masked: True if causality and the window mask pairs by their offset."""
        reach = shift - grid.query.length + 1, shift + grid.key.length - 1
        first, last = reach
        if masked:  # no farther than a step beyond the pairs, as kernels' numbers have 32 bits
            lowest, highest = grid.band
            first = min(max(first, lowest), reach[1] + 1)
            last = max(min(last, highest), reach[0] - 1)
        domain = (first, last) if first <= last else (shift, shift)
        return cls(domain, reach, shift, (first, last))

    @classmethod
    def of_intervals(cls, intervals: Int[Tensor, "3 b Q"], keys: int) -> Offsets:
        """Offsets of a grid with given intervals of visible keys."""
        low, high, base = intervals
        reach = int(base.min()), int(base.max()) + keys - 1
        sees_any = low < high
        if not bool(sees_any.any()):
            return cls((reach[0], reach[0]), reach, intervals=intervals)
        domain = int((low + base)[sees_any].min()), int((high - 1 + base)[sees_any].max())
        return cls(domain, reach, intervals=intervals)

    def shown_keys(self, queries: int, keys: int) -> tuple[int, int]:
        """Indices of keys from the first that a query sees up to the last plus one."""
        if self.intervals is None:
            (lowest, highest), shift = self.band, self.shift
            return max(0, lowest - shift), min(keys, highest - shift + queries)
        low, high, _ = self.intervals
        sees_any = low < high
        return (
            (int(low[sees_any].min()), int(high[sees_any].max()))
            if bool(sees_any.any())
            else (0, 0)
        )

    @property
    def shows_offset_zero(self) -> bool:
        """True if each query that sees any key sees the key of offset 0."""
        if self.intervals is None:
            first, last = self.band
            return first <= 0 <= last
        low, high, base = self.intervals
        return bool(((low >= high) | ((low + base <= 0) & (high + base > 0))).all())

    def of_keys(self, queries: int, begin: int, end: int) -> Offsets:
        """Offsets of the keys ``begin`` to ``end`` (exclusive), which include all visible ones."""
        if self.intervals is not None:
            low, high, base = self.intervals
            ends = (low - begin).clamp(min=0), (high - begin).clamp(min=0)
            return Offsets.of_intervals(torch.stack([*ends, base + begin]), end - begin)
        shift = self.shift + begin
        reach = shift - queries + 1, shift + end - begin - 1
        return replace(self, reach=reach, shift=shift)

    @property
    def origin(self) -> int:
        """The number that the kernels' 32-bit offsets are counted from, small wherever tokens are.

        0 if it is among the offsets or next to them, else the nearest number that is: each offset
        keeps its sign, which tells whether a key is before the query's own, after it, or that one.
        """
        smallest, largest = self.reach
        return min(max(0, smallest - 1), largest + 1)

    def entries(self, max_distance: int | None) -> tuple[int, int]:
        """The smallest and largest offset of a regular grid that terms are read at.

        Visible offsets beyond them read what these read, and so may hidden ones.

        Args:
            max_distance: no term changes beyond it; None: not known.
        """
        (smallest, largest), (first, last) = self.reach, self.band
        last = max(last, smallest - 1)  # where no pair is visible, beside the offsets
        first = min(first, last + 1)
        far = max(abs(smallest), abs(largest)) if max_distance is None else max_distance
        lowest = max(min(max(first, -far), last), smallest)
        highest = min(max(min(last, far), lowest), largest)
        return min(lowest, highest), highest

    def geometry(self) -> Geometry:
        """The record for kernels, with offsets counted from the origin."""
        origin, intervals = self.origin, self.intervals
        if intervals is not None:
            low, high, base = intervals
            intervals = torch.stack([low, high, base - origin]).to(torch.int32)
        lowest, highest = self.band
        return Geometry(self.shift - origin, lowest - origin, highest - origin, intervals=intervals)


@dataclass(frozen=True)
class Spacing:
    """Spacing of tokens within each document.

    Args:
        shift: key position less query position is ``j - i + shift`` for all tokens i and j that
            share a document.
        ordered: their orders differ by the same number.
    """

    shift: int
    ordered: bool


def find_spacing(grid: Grid) -> Spacing | str:
    """``spacing`` where offsets are all that depends on positions; otherwise the reason against it.

    Reads the values of layouts with documents or padding, once, unless these are said to be
    consecutive and are not at hand: on the CPU they may have been written since.
    """
    if grid.query.axes != 1:
        return "positions on several axes have no single offset"
    if grid.shift is not None:
        return Spacing(grid.shift, True)
    sides = (grid.query, grid.key)
    if any(more is not None for side in sides for more in (side.special, side.signal)):
        return "special tokens and signals are no function of the offset"
    if torch.is_grad_enabled() and any(side.positions.requires_grad for side in sides):
        return "an offset bias has no gradients for positions"
    at_hand = grid.query.device.type == "cpu" and has_values(grid.query.positions)
    if grid.query is grid.key and grid.query.consecutive and not at_hand:
        return Spacing(0, True)
    if torch.compiler.is_compiling():
        return "inside a compiled graph nothing tells whether tokens are one position apart"
    return spacing(grid) or "its tokens are not one position apart in each document"


def spacing(grid: Grid) -> Spacing | None:
    """Spacing of a grid's documents; None where not all tokens of one are one step apart.

    Reads the layouts' values, which waits for the device, once for each pair of layouts.
    """
    return reused_of_grid(_spacing, "spacing", grid=grid, masked=False)


def _spacing(grid: Grid) -> Spacing | None:
    """Compare how far each token is ahead of its place with the other tokens of its document."""
    rows = max(grid.query.batch, grid.key.batch)
    sides = [_leads(side, rows) for side in (grid.query, grid.key)]
    documents = torch.cat([document for document, _ in sides])
    if not len(documents):
        return Spacing(0, True)
    _, number = torch.unique(documents, dim=0, return_inverse=True)
    parts = number.split([len(document) for document, _ in sides])
    least, most = [], []
    for (_, lead), part in zip(sides, parts, strict=True):
        index = part.unsqueeze(1).expand(-1, 2)
        edge = lead.new_full((len(documents), 2), torch.inf)
        least.append(edge.scatter_reduce(0, index, lead, "amin"))
        most.append((-edge).scatter_reduce(0, index, lead, "amax"))
    shared = (least[0][:, 0] < torch.inf) & (least[1][:, 0] < torch.inf)
    lowest = (least[1] - most[0])[shared]
    highest = (most[1] - least[0])[shared]
    if not len(lowest):
        return Spacing(0, True)
    ends = torch.stack([lowest.amin(0), highest.amax(0)]).tolist()
    (position, order), (same_position, same_order) = ends
    if position != same_position or position != int(position):
        return None
    return Spacing(int(position), order == same_order == position)


def _leads(layout: Layout, rows: int) -> tuple[Tensor, Tensor]:
    """Row and document of each real token ``[n, 2]``; its position and order less its place."""
    size = (rows, layout.length)
    row = torch.arange(rows, device=layout.device).unsqueeze(1).expand(size)
    numbers = torch.stack([row, documents_of(layout).expand(size)], dim=-1)
    coordinates = (layout.positions[..., 0].detach(), layout.order)
    leads = torch.stack([x.double().expand(size) for x in coordinates], dim=-1)
    leads = leads - torch.arange(layout.length, device=layout.device).unsqueeze(1)
    if layout.valid is None:
        return numbers.flatten(0, 1), leads.flatten(0, 1)
    valid = layout.valid.expand(size)
    return numbers[valid], leads[valid]
