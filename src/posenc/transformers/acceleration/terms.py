"""Score terms that a transformers layer computed from its weights, and projected table rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import is_
from typing import Any, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention.problem.lowering import GivenTerms
from posenc.encoding import BucketedTerms, Encoding, StructuredScore, TokenTableProduct
from posenc.encoding.prepared import HasModules, reused_later
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.runtime import has_values


class Movable:
    """Mixin of records that layers hand on, with tensors, to layers on other devices."""

    def to(self, device: torch.device | str | int, **options: Any) -> Self:
        """The record on a device, to which hooks of accelerate send what a layer is given."""
        return cast(Self, _moved(self, torch.device(device)))


class ComputedOnce(Movable):
    """Mixin of records with a function ``compute`` whose result is kept as ``dense``."""

    compute: Callable[[], Any]
    _result: Any = None

    @property  # not cached_property, whose lock in Python 3.11 the compiler cannot trace
    def dense(self) -> Any:
        """The tensor written out for all pairs, computed once for all layers."""
        if self._result is None:
            self._result = self.compute()
        return self._result

    def to(self, device: torch.device | str | int, **options: Any) -> Self:
        moved = super().to(device)
        if moved is not self:
            moved.compute = lambda: self.dense.to(device)
        return moved


def _moved(x: Any, device: torch.device) -> Any:
    """A tensor on a device, and tuples and records of tensors; itself if it is there."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        parts = [_moved(part, device) for part in x]
        return x if all(map(is_, parts, x)) else tuple(parts)
    if not is_dataclass(x) or isinstance(x, type):
        return x
    values = {field.name: getattr(x, field.name) for field in fields(x)}
    moved = {name: _moved(value, device) for name, value in values.items()}
    return x if all(moved[name] is value for name, value in values.items()) else replace(x, **moved)


WITHOUT_TERMS = Encoding()
"""One for all calls, since what repeated calls reuse is kept by encoding."""


def encoding_of(*terms: StructuredScore) -> Encoding:
    """The encoding whose score part has these terms; none for no terms."""
    return Encoding(score=GivenTerms(*terms)) if terms else WITHOUT_TERMS


def products_by_offset(
    tokens: Float[Tensor, "B H Q E"], rows: Float[Tensor, "h N E"], behind: int
) -> BucketedTerms:
    """Products of queries with a row for each offset, clipped to those that have one.

    Args:
        tokens: queries, scaled.
        rows: for the offsets ``-behind`` … ``N - 1 - behind``, in order.
        behind: the largest distance to keys before a query that has a row of its own.
    """
    last = rows.shape[1] - 1

    def bucket(offset: Offsets) -> BucketIndex:
        return (offset[..., 0].long() + behind).clamp(0, last)

    left = TokenTableProduct(tokens, rows)
    return BucketedTerms(bucket, left=left, max_distance=max(behind, last - behind))


def bias_by_bucket(
    bucket: Callable[[Tensor], BucketIndex],
    table: nn.Embedding,
    buckets: int,
    *,
    max_distance: int,
    device: torch.device,
) -> BucketedTerms:
    """A bias of each head by the offset's row in an embedding, which is called for all its rows.

    Args:
        bucket: the row of each offset.
        table: of ``buckets`` rows, a number a head.
        max_distance: beyond which rows stay the same.
        device: of the rows' numbers.
    """
    rows = table(torch.arange(buckets, device=device))  # [N, H]
    return BucketedTerms(
        lambda offset: bucket(offset[..., 0].long()), table=rows.T, max_distance=max_distance
    )


FURTHEST = 1024
"""Distances up to which projections are kept: of more, attention takes far longer than they do."""


def cached_projection(
    project: Callable[[Float[Tensor, "n C"]], Float[Tensor, "H n D"]],
    rows: Tensor,
    axis: int,
    layers: Sequence[HasModules] = (),
    weights: Sequence[Tensor] = (),
) -> Float[Tensor, "H N D"] | None:
    """``project(rows)``, a part of a table's; None where ``reused_later`` has nothing.

    Rows around the middle of the table, a power of two on either side, are projected at once, since
    few such ranges serve all lengths.

    Args:
        project: by ``layers`` and ``weights`` alone.
        rows: of positions, a view of consecutive rows of the table; else the result is None.
        axis: of the N positions; along others rows are the same.
    """
    if not has_values(rows):
        return None
    table, count, width = rows._base, rows.shape[axis], rows.shape[-1]
    if table is None or not table.is_contiguous() or table.shape[-1] != width:
        return None
    first, remainder = divmod(int(rows.storage_offset()) - int(table.storage_offset()), width)
    if remainder or rows.stride(axis) != width or rows.stride(-1) != 1:
        return None
    size = table.numel() // width
    middle = size // 2
    reach = max(middle - first, first + count - middle)
    if reach > FURTHEST:
        return None
    reach = 2 ** math.ceil(math.log2(reach))
    start, end = max(middle - reach, 0), min(middle + reach, size)

    def compute() -> Tensor:
        return project(table.view(size, width)[start:end]).contiguous()

    name = ("projection", *map(id, weights))  # layers of a model have weights of their own
    tensors = (*weights, table)
    cached = reused_later(compute, name, start, end, layers=layers, tensors=tensors)
    return None if cached is None else cached[:, first - start : first - start + count]
