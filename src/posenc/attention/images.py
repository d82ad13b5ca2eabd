"""Tables of the offsets between the cells of whole images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms, StructuredScore
from posenc.grid import Grid

__all__ = ["image_table", "serves_images"]


def serves_images(grid: Grid, lowered: Sequence[StructuredScore] | None) -> bool:
    """True if tables over the offsets between whole, fully visible images are the only terms."""
    sides = (grid.query, grid.key)
    plain = all(side.extent is not None and side.special is None for side in sides)
    if not plain or grid.segmented or grid.causal or grid.window is not None or not lowered:
        return False
    return all(isinstance(term, BucketedTerms) and _table_only(term) for term in lowered)


def _table_only(group: BucketedTerms) -> bool:
    others = (group.left, group.right, group.column, group.value)
    return group.table is not None and all(other is None for other in others)


def image_table(
    lowered: Sequence[StructuredScore], grid: Grid, *, device: torch.device
) -> Float[Tensor, "H Y X"]:
    """The sum of the tables at every offset (Δy, Δx), both ascending."""
    (rows, columns), (key_rows, key_columns) = grid.query.extent, grid.key.extent  # type: ignore[misc]
    down = torch.arange(1 - rows, key_rows, device=device, dtype=torch.float32)
    across = torch.arange(1 - columns, key_columns, device=device, dtype=torch.float32)
    offsets = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1)
    tables = [
        group.table[:, group.bucket(offsets)]
        for group in lowered
        if isinstance(group, BucketedTerms) and group.table is not None
    ]
    return torch.stack(tables).sum(0)
