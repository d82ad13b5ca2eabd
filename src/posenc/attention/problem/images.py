"""Terms between the cells of whole images, by the offset between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.problem.terms import reads_offsets
from posenc.encoding import BucketedTerms, StructuredScore
from posenc.grid import Grid


def serves_images(grid: Grid, lowered: Sequence[StructuredScore] | None) -> bool:
    """True if all terms follow from the offsets between whole, fully visible images.

    Buckets of rows are read to find those that are met, which graphs cannot.
    """
    sides = (grid.query, grid.key)
    plain = all(side.extent is not None and side.special is None for side in sides)
    if not (plain and grid.dense and lowered):
        return False
    groups = [term for term in lowered if isinstance(term, BucketedTerms) and reads_offsets(term)]
    if len(groups) < len(lowered) or any(group.column is not None for group in groups):
        return False
    return not (torch.compiler.is_compiling() and any(map(has_products, groups)))


def has_products(group: BucketedTerms) -> bool:
    """True if a group has rows that queries, keys or weights are multiplied by."""
    return any(part is not None for part in (group.left, group.right, group.value))


def with_rows(group: BucketedTerms, read: Callable[[Tensor], Tensor]) -> BucketedTerms:
    """The group with its rows replaced by a function of them."""
    left, right, value = group.left, group.right, group.value
    return replace(
        group,
        left=left and replace(left, rows=read(left.rows)),
        right=right and replace(right, rows=read(right.rows)),
        value=None if value is None else read(value),
    )


def are_axial(groups: Sequence[BucketedTerms], grid: Grid) -> bool:
    """True if queries alone are multiplied by rows, each group's for one axis of the offset."""
    for group in groups:
        if group.right is not None or group.value is not None or axis_of(group, grid) is None:
            return False
    return True


def axis_of(group: BucketedTerms, grid: Grid) -> int | None:
    """The axis of the offset that a group's bucket follows from alone; None if it needs both."""
    bucket = group.bucket(_offsets(grid, device=grid.query.device))
    if torch.equal(bucket, bucket[:, :1].expand_as(bucket)):
        return 0
    return 1 if torch.equal(bucket, bucket[:1].expand_as(bucket)) else None


def axis_rows(
    group: BucketedTerms, grid: Grid, rows: Float[Tensor, "h M F"]
) -> Float[Tensor, "h N F"]:
    """Rows by bucket of a group, for every offset along columns, then along rows.

    Zero for those of the axis that its bucket does not depend on.
    """
    axis = axis_of(group, grid)
    offsets = _offsets(grid, device=grid.query.device)
    along = (offsets[:, :1].flatten(0, 1), offsets[:1].flatten(0, 1))
    assert axis is not None
    others = len(along[1 - axis])
    ends = (0, 0, 0, others) if axis == 0 else (0, 0, others, 0)
    return torch.nn.functional.pad(rows[:, group.bucket(along[axis])], ends)


def shared_buckets(
    groups: Sequence[BucketedTerms], grid: Grid
) -> tuple[Int[Tensor, "W"], Int[Tensor, "groups N"]]:
    """Combinations of the groups' buckets: one by offset, and each group's bucket in them."""
    offsets = _offsets(grid, device=grid.query.device).flatten(0, 1)
    indices = torch.stack([group.bucket(offsets) for group in groups])
    combined = indices[0]
    for more in indices[1:]:
        combined = combined * (int(more.max()) + 1) + more
    combinations, bucket = torch.unique(combined, return_inverse=True)
    return bucket, indices.new_empty(len(indices), len(combinations)).index_copy_(
        1, bucket, indices
    )


def image_table(
    groups: Sequence[BucketedTerms], grid: Grid, *, device: torch.device
) -> Float[Tensor, "H W"] | None:
    """The sum of the tables at every offset (Δy, Δx), both ascending; None without tables."""
    offsets = _offsets(grid, device=device).flatten(0, 1)
    tables = [x.table[:, x.bucket(offsets)] for x in groups if x.table is not None]
    return torch.stack(tables).sum(0) if tables else None


def _offsets(grid: Grid, *, device: torch.device) -> Float[Tensor, "Y X 2"]:
    """Every offset (Δy, Δx) between two images, both ascending."""
    (rows, columns), (key_rows, key_columns) = grid.query.extent, grid.key.extent  # type: ignore[misc]
    down = torch.arange(1 - rows, key_rows, device=device, dtype=torch.float32)
    across = torch.arange(1 - columns, key_columns, device=device, dtype=torch.float32)
    return torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1)
