"""Linear attention by prefix sums over the visible keys, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import documents_of

NOTHING = -1e30
"""Log-weight of masked keys; finite, to avoid inf − inf."""

PADDING = torch.iinfo(torch.int64).min
"""Document number of padding, unlike any real token's."""


class Queries(NamedTuple):
    """φ(q) for the denominator, and φ(q) after the query_key part for the numerator."""

    plain: Float[Tensor, "B H L F"]
    rotated: Float[Tensor, "B H L D"]


class Keys(NamedTuple):
    """φ(k) before and after the query_key part, with values.

    Args:
        plain, rotated: as of ``Queries``.
        value: ``[B, H, L, E]``.
        level: the logarithm of a factor of each key, so that its features may be at most 1;
            None where there is none.
    """

    plain: Float[Tensor, "B H L F"]
    rotated: Float[Tensor, "B H L D"]
    value: Float[Tensor, "B H L E"]
    level: Float[Tensor, "B H L 1"] | None

    def hide(self, hidden: Bool[Tensor, "b 1 L 1"]) -> Keys:
        """The keys, with zero weight where ``hidden``."""
        plain, rotated = (x.masked_fill(hidden, 0.0) for x in (self.plain, self.rotated))
        level = None if self.level is None else self.level.masked_fill(hidden, NOTHING)
        return Keys(plain, rotated, self.value, level)


Side = TypeVar("Side", Queries, Keys)


def changed(side: Side, change: Callable[[Tensor], Tensor]) -> Side:
    """``side`` with ``change`` applied to each of its tensors."""
    return type(side)._make(None if x is None else change(x) for x in side)


def _split(side: Side, chunk: int) -> list[Side]:
    """Pieces along the tokens. Not slices: the gradient of a slice is as long as the row."""
    pieces = [repeat(None) if x is None else torch.split(x, chunk, dim=2) for x in side]
    return [type(side)._make(piece) for piece in zip(*pieces, strict=False)]


@dataclass(frozen=True, eq=False)
class PastSums:
    """The sums over the past of each row's last document, divided by ``exp(level)``.

    Args:
        total: ``Σ_j f(φ(k_j)) v_jᵀ``, ``[B, H, D, E]``.
        norm: ``Σ_j φ(k_j)``, ``[B, H, F, 1]``.
        level: ``[B, H, 1, 1]``; None where keys have none.
        document: which document that is, ``[B|1, 1]``.
    """

    total: Float[Tensor, "B H D E"]
    norm: Float[Tensor, "B H F 1"]
    level: Float[Tensor, "B H 1 1"] | None
    document: Int[Tensor, "b 1"]


class LinearState:
    """State of linear attention over the past; its size does not depend on the length."""

    def __init__(self) -> None:
        self.memory: PastSums | None = None

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these batch rows, in this order; a row may come more than once (beam search)."""
        if self.memory is not None:
            past = self.memory
            document = past.document[rows] if past.document.shape[0] > 1 else past.document
            level = None if past.level is None else past.level[rows]
            self.memory = PastSums(past.total[rows], past.norm[rows], level, document)

    def detach(self) -> None:
        """Forget the graph that made it (between segments of truncated backpropagation)."""
        if self.memory is not None:
            past = self.memory
            self.memory = replace(past, total=past.total.detach(), norm=past.norm.detach())


def weighted_means(
    queries: Queries, keys: Keys, grid: Grid, chunk: int, state: LinearState
) -> Float[Tensor, "B H Q E"]:
    """``Σ_j q'_i·k'_j v_j / Σ_j q_i·k_j`` over the keys each query sees; 0 where it sees none.

    The keys of the row's last document are then in the state, as those of the past were.
    """
    document = torch.zeros_like(grid.key.order[:1])
    if not grid.segmented and not grid.causal:
        _absorb(keys, document, state)
        return _read(queries, document[:, :1], state, None)
    aligned = grid.shift == 0 and grid.query.length == grid.key.length
    if not grid.segmented and aligned:
        return _scan(queries, keys, document, chunk, state)
    return _scan_events(queries, keys, grid, chunk, state)


def _scan(
    queries: Queries, keys: Keys, document: Int[Tensor, "b L"], chunk: int, state: LinearState
) -> Tensor:
    """Each query over the keys at and before its own place in the row, within its document."""
    outputs = []
    parts = (_split(queries, chunk), _split(keys, chunk), torch.split(document, chunk, dim=1))
    for these, those, group in zip(*parts, strict=True):
        outputs.append(_read(these, group, state, those))
        _absorb(those, group, state)
    return torch.cat(outputs, dim=2)


def _scan_events(
    queries: Queries, keys: Keys, grid: Grid, chunk: int, state: LinearState
) -> Tensor:
    """Any grid, as rows of events: each query after all the keys that it may see."""
    sides = (grid.key, grid.query)
    rows = max(side.batch for side in sides)
    # Padding comes first, as a document of its own: what is last in a row is real if anything is.
    document = torch.cat([_groups(side).expand(rows, -1) for side in sides], dim=1)
    steps = [side.order if grid.causal else torch.zeros_like(side.order) for side in sides]
    rank = torch.cat([(2 * s + kind).expand(rows, -1) for kind, s in enumerate(steps)], dim=1)
    index = rank.argsort(dim=1, stable=True)
    index = index.gather(1, document.gather(1, index).argsort(dim=1, stable=True))

    count = grid.key.length
    hidden = (document == PADDING)[:, None, :, None]
    hidden = hidden | (torch.arange(index.shape[1], device=index.device) >= count).unsqueeze(-1)
    ahead, behind = (0, 0, count, 0), (0, 0, 0, grid.query.length)
    pad = torch.nn.functional.pad
    output = _scan(
        changed(queries, lambda x: _pick(pad(x, ahead), index)),
        changed(changed(keys, lambda x: pad(x, behind)).hide(hidden), lambda x: _pick(x, index)),
        document.gather(1, index),
        chunk,
        state,
    )
    return _pick(output, index.argsort(dim=1)[:, count:])


def _groups(layout: Layout) -> Int[Tensor, "b L"]:
    document = documents_of(layout)
    return document if layout.valid is None else document.where(layout.valid, PADDING)


def _pick(x: Float[Tensor, "B H L D"], index: Int[Tensor, "b N"]) -> Float[Tensor, "B H N D"]:
    return x.gather(2, index[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))


def _read(
    queries: Queries, document: Int[Tensor, "b L"], state: LinearState, keys: Keys | None
) -> Float[Tensor, "B H L E"]:
    """Output of a chunk of queries, from the state and the keys of their own chunk."""
    above = below = queries.rotated.new_zeros(())
    past, here = _weights(document, state.memory, keys)
    if state.memory is not None:
        above = past * (queries.rotated @ state.memory.total)
        below = past * (queries.plain @ state.memory.norm)
    if keys is not None:
        above = above + (here * (queries.rotated @ keys.rotated.mT)) @ keys.value
        below = below + (here * (queries.plain @ keys.plain.mT)).sum(-1, keepdim=True)
    something = below > 0
    return (above / below.where(something, 1.0)).masked_fill(~something, 0.0)


def _weights(
    document: Int[Tensor, "b L"], past: PastSums | None, keys: Keys | None
) -> tuple[Tensor, Tensor]:
    """Factors of the past, ``[b, h, L, 1]``, and of each key here, ``[b, h, L, L]``, a query.

    They are relative to the largest key that the query sees, so that one far ahead of it, however
    large, takes nothing away.
    """
    nothing = torch.zeros((), dtype=torch.bool, device=document.device)
    goes_on = visible = nothing
    if past is not None:
        goes_on = (document == past.document)[:, None, :, None]
    if keys is not None:
        visible = (document.unsqueeze(2) == document.unsqueeze(1)).tril().unsqueeze(1)
    before = None if past is None else past.level
    within = None if keys is None or keys.level is None else keys.level.mT
    if before is None and within is None:
        return goes_on, visible
    before = _level(before, goes_on, like=within)
    within = _level(within, visible, like=before)
    top = torch.maximum(before, within.amax(-1, keepdim=True))
    return _weigh(before, top), _weigh(within, top)


def _level(level: Tensor | None, visible: Tensor, *, like: Tensor | None) -> Tensor:
    if level is not None:
        return level.where(visible, NOTHING)
    assert like is not None  # callers have one of the two
    return like.new_full((1, 1, 1, 1), NOTHING)


def _weigh(level: Tensor, top: Tensor) -> Tensor:
    """``exp(level - top)``; 0 for what is not there, also where nothing is."""
    return (level - top.where(top > NOTHING, 0.0)).exp()


def _absorb(keys: Keys, document: Int[Tensor, "b L"], state: LinearState) -> None:
    """Add the keys of the row's last document to the state, and forget other documents."""
    past, last = state.memory, document[:, -1:]
    if past is not None:
        last = last.where(last != PADDING, past.document)
    there = (document == last)[:, None, :, None]
    goes_on = None if past is None else (past.document == last)[:, None, :, None]
    top = None
    weight, decay = there, goes_on
    if keys.level is not None:
        level = keys.level.where(there, NOTHING)
        top = level.amax(2, keepdim=True)
        if past is not None and past.level is not None and goes_on is not None:
            before = past.level.where(goes_on, NOTHING)
            top = torch.maximum(top, before)
            decay = _weigh(before, top)
        weight = _weigh(level, top)
    total = (weight * keys.rotated).mT @ keys.value
    norm = (weight * keys.plain).sum(2).unsqueeze(-1)
    if past is not None and decay is not None:
        total, norm = total + decay * past.total, norm + decay * past.norm
    state.memory = PastSums(total, norm, top, last)
