"""Segments (documents and padding) and order as the kernels read them, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["Spacing", "segment_ids_of", "spacing", "summary_of"]


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


def segment_ids_of(grid: Grid) -> tuple[Tensor, Tensor]:
    """The segment of each token of each side, ``[B|1, L]``: pairs of different numbers are hidden.

    Padding has a number that no token of the other side has.
    """
    least = torch.iinfo(torch.int64).min
    query, key = (_segment_ids(side, least + i) for i, side in enumerate((grid.query, grid.key)))
    return query, key


def _segment_ids(layout: Layout, padding: int) -> Tensor:
    labels = torch.zeros_like(layout.order) if layout.document is None else layout.document
    if layout.valid is not None:
        labels = labels.masked_fill(~layout.valid, padding)
    return labels.contiguous()


def summary_of(segment_ids: Tensor | None, order: Tensor | None, granule: int) -> Tensor | None:
    """Least and greatest order and segment of each granule of real tokens: ``[b, n, 4]``.

    The two segments of a granule with padding differ, so that it is not taken for one without.
    """
    if segment_ids is None:
        return None
    large = 2**60
    order = torch.zeros_like(segment_ids) if order is None else order
    rows = max(len(segment_ids), len(order))
    missing = -segment_ids.shape[1] % granule
    real = torch.nn.functional.pad(segment_ids > torch.iinfo(torch.int64).min + 1, (0, missing))
    real = real.view(len(real), -1, granule)
    padded = (~real).any(-1).long()
    found = []
    for values, less in ((order, 0), (segment_ids, padded)):
        each = torch.nn.functional.pad(values, (0, missing)).view(len(values), -1, granule)
        least = each.masked_fill(~real, large).amin(-1) - less
        most = each.masked_fill(~real, -large).amax(-1)
        found += [least.expand(rows, -1), most.expand(rows, -1)]
    return torch.stack(found, dim=-1)


_KNOWN: WeakKeyDictionary[Layout, WeakKeyDictionary[Layout, tuple[Spacing | None]]]
_KNOWN = WeakKeyDictionary()


def spacing(grid: Grid) -> Spacing | None:
    """Spacing of a grid's documents; None where not all tokens of one are one step apart.

    Reads the layouts' values, which waits for the device, once for each pair of layouts.
    """
    known = _KNOWN.setdefault(grid.query, WeakKeyDictionary())
    if grid.key not in known:
        known[grid.key] = (_spacing(grid),)
    return known[grid.key][0]


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
    document = torch.zeros_like(layout.order) if layout.document is None else layout.document
    numbers = torch.stack([row, document.expand(size)], dim=-1)
    seen = torch.stack([layout.positions[..., 0].double(), layout.order.double()], dim=-1)
    place = torch.arange(layout.length, device=layout.device).unsqueeze(1)
    leads = (seen.detach() - place).expand(*size, 2)
    if layout.valid is None:
        return numbers.flatten(0, 1), leads.flatten(0, 1)
    valid = layout.valid.expand(size)
    return numbers[valid], leads[valid]
