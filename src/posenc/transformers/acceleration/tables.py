"""Projections of rows of a table of positions, kept while table and weights stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from posenc.encoding.prepared import HasModules, reused_later
from posenc.runtime import has_values

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
