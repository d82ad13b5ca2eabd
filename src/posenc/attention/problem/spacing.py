"""Spacing of the tokens of documents, read from the values of layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.attention.problem.lowering import lower
from posenc.attention.problem.problem import Problem
from posenc.encoding import StructuredScore
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import documents_of
from posenc.runtime import has_values


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


def nearest_origin(smallest: int, largest: int) -> int:
    """The number that offsets of this range are counted from, to be small wherever tokens are.

    0 if it is among them or next to them, else the nearest number that is: each offset keeps its
    sign, which tells whether a key is before the query's own, after it, or that one.
    """
    return min(max(0, smallest - 1), largest + 1)


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


def lower_on_sequences(problem: Problem, shift: int) -> tuple[StructuredScore, ...] | None:
    """Terms of a problem on plain sequences, as far apart: some parts have a structured form there
    only. Where ``find_spacing`` found the shift, the offsets are the same."""
    score = problem.encoding.score
    if score is not None and score.replaces_product:
        return None
    original = problem.grid
    query = Layout.sequence(original.query.length, device=original.query.device)
    key = Layout.sequence(original.key.length, shift, device=original.key.device)
    grid = Grid(query, key, original.causal, original.window, original.intervals)
    return lower(problem.encoding, problem.q, problem.k, grid, scale=problem.scale)


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
