"""Decomposed relative positions of images, as in MViTv2 and SAM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from posenc.arguments import Count, Width
from posenc.encoding import BucketedTerms, Entry, ScoreTerm, TokenTableProduct
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import gather_rows
from posenc.encodings.common.special_tokens import has_special, zero_special_pairs
from posenc.encodings.common.window import Window
from posenc.grid import Grid


class Decomposed2d(ScoreTerm):
    """Decomposed relative positions: a vector for each row offset and one for each column offset.

    ``s_ij += q_i · R^h[Δ'_y + Y - 1] + q_i · R^w[Δ'_x + X - 1]`` (MViTv2).

    Δ' = (row, column) of query i less that of key j, in cells (a fractional one is rounded);
    ``R^h`` ``[2Y - 1, D]`` and ``R^w`` ``[2X - 1, D]``, shared by the heads, zero at first. The
    query is not scaled here, though it is in q·k, as in both models' code. Pairs with a special
    token have no such term. MViTv2's pooled keys are a layout too: of every r-th cell, at
    ``r·j + r - 1``. Lowered to one group per axis, without Q×K memory. Differs from SAM in nothing
    while images are of ``size`` or smaller; SAM resizes its tables silently otherwise, which is an
    extension's work here.

    Args:
        head_dim: width D of a head.
        size: (Y, X), the largest image in cells. A visible pair farther apart is refused with a
            LengthError where that is known without waiting for a device, and has NaN for a logit
            elsewhere. SAM has 14 by 14 for its windows and 64 by 64 for whole images.

    Raises:
        ArgumentError: when ``head_dim`` or a side of ``size`` is below 1.

    Reference: Li et al. 2021, "MViTv2: Improved Multiscale Vision Transformers for Classification
    and Detection", https://arxiv.org/abs/2112.01526; Kirillov et al. 2023, "Segment Anything".

    >>> import posenc
    >>> part = posenc.create("decomposed2d", head_dim=8, size=(2, 3)).score
    >>> part.rows.shape, part.columns.shape
    (torch.Size([3, 8]), torch.Size([5, 8]))
    """

    axes = (2,)
    rows_by_position = True

    head_dim: Width
    size: tuple[Count, Count] = (14, 14)

    def __post_init__(self) -> None:
        self.window = Window(*self.size)
        rows, columns = (torch.empty(span, self.head_dim) for span in self.window.spans)
        self.rows, self.columns = nn.Parameter(rows), nn.Parameter(columns)

    def reset_parameters(self) -> None:
        """Start at zero, as SAM does."""
        nn.init.zeros_(self.rows)
        nn.init.zeros_(self.columns)

    def _axes(self) -> list[tuple[Callable[[Offsets], BucketIndex], Tensor]]:
        """Bucket map and table of each axis; the last row, zero, is for pairs outside."""
        tables = (self.rows, self.columns)
        return [
            (partial(self.window.along, axis=axis), nn.functional.pad(table, (0, 0, 0, 1))[None])
            for axis, table in enumerate(tables)
        ]

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        inside = self.window.require(grid)
        offset, total = grid.offset, q.new_zeros(())
        for bucket, table in self._axes():
            total = total + gather_rows(q, table, bucket(offset))
        if not inside:
            outside = self.window.index(offset) == self.window.count
            total = total.masked_fill(outside.unsqueeze(1), float("nan"))
        return zero_special_pairs(total, grid)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        if has_special(grid):
            return None
        inside = self.window.require(grid)
        groups = []
        for bucket, table in self._axes():
            bias = None
            if not inside:  # unchecked pairs outside have NaN
                bias = q.new_zeros(q.shape[1], table.shape[1])
                bias[:, -1] = float("nan")
            groups.append(BucketedTerms(bucket, table=bias, left=TokenTableProduct(q, table)))
        return tuple(groups)


ENTRY = Entry(
    factory=Decomposed2d,
    summary="Adds a query's products with a vector for the row and one for the column offset.",
    relative=True,
    trainable=True,
    extrapolates="Not at all: a larger image needs the tables resampled (posenc.extension).",
    cost="Q·K·H beside 2·Q·(Y + X)·D·H",
)
