"""Sums over the tokens between a key and a query, by order: what methods that count need.

Keys may come in any arrangement (shards, beams, packed rows), so nothing here takes the place of
a key in its tensor for its place in the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encodings.common.precision import widest
from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["Ranks"]


@dataclass(frozen=True, eq=False)
class Ranks:
    """Where queries and keys stand among the keys of a grid, sorted by document and order.

    Padding comes last.

    Args:
        arrangement: ``[b, K]``, the key at each rank; None where keys are sorted as they come.
        before: ``[b, K]``, how many keys are of the same document and lower order than each key,
            or of a document before.
        until: ``[b, K]``, the same with keys of equal order (itself among them).
        query_until: ``[b, Q]``, ``until`` of the queries.
    """

    arrangement: Int[Tensor, "b K"] | None
    before: Int[Tensor, "b K"]
    until: Int[Tensor, "b K"]
    query_until: Int[Tensor, "b Q"]

    @classmethod
    def of(cls, grid: Grid) -> Ranks:
        """The ranks of a grid's keys and queries; reads no tensor's values on the host."""
        places, query_places = _places(grid.key, grid.query)
        if grid.key.start is not None and not grid.marked:
            before, query_until = places - grid.key.start, query_places - grid.key.start + 1
            return cls(None, before, before + 1, query_until.clamp(0, grid.key.length))
        ordered, arrangement = places.sort(dim=-1, stable=True)
        return cls(
            arrangement,
            _count(ordered, places, right=False),
            _count(ordered, places, right=True),
            _count(ordered, query_places, right=True),
        )

    @property
    def own(self) -> Int[Tensor, "b K"]:
        """Each key's rank; keys of equal order stand as they come."""
        if self.arrangement is None:
            return torch.arange(self.before.shape[-1], device=self.before.device).unsqueeze(0)
        return self.arrangement.argsort(dim=-1)

    def arrange(self, values: Float[Tensor, "b *dims K"]) -> Float[Tensor, "b *dims K"]:
        """``values`` of the keys in the order of their ranks."""
        return values if self.arrangement is None else _read(values, self.arrangement)

    def running(
        self, values: Float[Tensor, "b H K"]
    ) -> tuple[Float[Tensor, "b H Q"], Float[Tensor, "b H K"]]:
        """At each query and each key, the sum of ``values`` up to it, in float64.

        The difference of the two is the sum over the keys after the one and up to the other;
        float64 keeps it exact where thousands of values have been added before.
        """
        wide = self.arrange(values.to(widest(values.device)))
        sums = torch.nn.functional.pad(wide.cumsum(-1), (1, 0))
        return _read(sums, self.query_until), _read(sums, self.until)

    def from_key(self, values: Float[Tensor, "b H Q K"]) -> Float[Tensor, "b H Q K"]:
        """For each key, the sum of a query's ``values`` over this key and those after it."""
        sums = self.arrange(values).flip(-1).cumsum(-1).flip(-1)
        return _read(sums, self.before)

    def after_key(self, values: Float[Tensor, "b H Q K"]) -> Float[Tensor, "b H Q K"]:
        """For each key, the sum of a query's ``values`` over those after it.

        Of keys of equal order, those that come later in the tensor count as after.
        """
        sums = self.arrange(values).flip(-1).cumsum(-1).flip(-1)
        later = torch.nn.functional.pad(sums, (0, 1))[..., 1:]
        return later if self.arrangement is None else _read(later, self.own)


def _places(key: Layout, query: Layout) -> tuple[Int[Tensor, "b K"], Int[Tensor, "b Q"]]:
    """One number a token that sorts by document, then by order, and padding last."""
    last = torch.iinfo(torch.int64).max
    if key.document is None and query.document is None:
        order = key.order if key.valid is None else key.order.where(key.valid, last)
        return order, query.order
    least = torch.minimum(key.order.min(), query.order.min())
    most = torch.maximum(key.order.max(), query.order.max())
    places = []
    for side in (key, query):
        document = 0 if side.document is None else side.document
        places.append(document * (most - least + 1) + side.order - least)
    if key.valid is not None:
        places[0] = places[0].where(key.valid, last)
    return places[0], places[1]


def _count(ordered: Tensor, places: Tensor, *, right: bool) -> Int[Tensor, "b N"]:
    """How many of ``ordered`` are below each of ``places``; with ``right``, below or equal."""
    rows = max(ordered.shape[0], places.shape[0])
    each = (side.expand(rows, -1).contiguous() for side in (ordered, places))
    return torch.searchsorted(*each, right=right)


def _read(values: Tensor, index: Int[Tensor, "b N"]) -> Tensor:
    """``values[b, ..., index[b, n]]``, rows of either repeated as the other has them."""
    rows = max(values.shape[0], index.shape[0])
    middle = values.shape[1:-1]
    values = values.expand(rows, *middle, values.shape[-1])
    index = index.view(index.shape[0], *(1 for _ in middle), index.shape[-1])
    return values.gather(-1, index.expand(rows, *middle, index.shape[-1]))
