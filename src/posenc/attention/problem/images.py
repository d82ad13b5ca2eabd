"""Terms between the cells of whole images as tables by offset."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms, StructuredScore
from posenc.grid import Grid


def serves_images(grid: Grid, lowered: Sequence[StructuredScore] | None) -> bool:
    """True if all terms are tables over the offsets between whole, fully visible images, or
    queries are multiplied by rows for one axis of the offset, whose buckets are read."""
    sides = (grid.query, grid.key)
    plain = all(side.extent is not None and side.special is None for side in sides)
    if not (plain and grid.dense and lowered):
        return False
    for term in lowered:
        if not isinstance(term, BucketedTerms) or (term.table, term.left) == (None, None):
            return False
        if any(part is not None for part in (term.right, term.column, term.value)):
            return False
        if term.left is not None and (torch.compiler.is_compiling() or axis_of(term, grid) is None):
            return False
    return True


def axis_of(group: BucketedTerms, grid: Grid) -> int | None:
    """The axis of the offset that a group's bucket follows from alone; None if it needs both."""
    bucket = group.bucket(_offsets(grid, device=grid.query.device))
    if torch.equal(bucket, bucket[:, :1].expand_as(bucket)):
        return 0
    return 1 if torch.equal(bucket, bucket[:1].expand_as(bucket)) else None


def axis_rows(group: BucketedTerms, grid: Grid) -> Float[Tensor, "h N F"]:
    """Rows that a group multiplies queries by, for every offset along columns, then along rows.

    Zero for those of the axis that its bucket does not depend on.
    """
    assert group.left is not None
    axis = axis_of(group, grid)
    offsets = _offsets(grid, device=grid.query.device)
    along = (offsets[:, :1].flatten(0, 1), offsets[:1].flatten(0, 1))
    assert axis is not None
    rows = group.left.rows[:, group.bucket(along[axis])]
    others = len(along[1 - axis])
    return torch.nn.functional.pad(rows, (0, 0, 0, others) if axis == 0 else (0, 0, others, 0))


def image_table(
    lowered: Sequence[StructuredScore], grid: Grid, *, device: torch.device
) -> Float[Tensor, "H Y X"]:
    """The sum of the tables at every offset (Δy, Δx), both ascending."""
    offsets = _offsets(grid, device=device)
    tables = [
        group.table[:, group.bucket(offsets)]
        for group in lowered
        if isinstance(group, BucketedTerms) and group.table is not None
    ]
    return torch.stack(tables).sum(0)


def _offsets(grid: Grid, *, device: torch.device) -> Float[Tensor, "Y X 2"]:
    """Every offset (Δy, Δx) between two images, both ascending."""
    (rows, columns), (key_rows, key_columns) = grid.query.extent, grid.key.extent  # type: ignore[misc]
    down = torch.arange(1 - rows, key_rows, device=device, dtype=torch.float32)
    across = torch.arange(1 - columns, key_columns, device=device, dtype=torch.float32)
    return torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1)
