"""Terms of an encoding at the offsets of the cached past, read once for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.problem.lowering import lower
from posenc.encoding import BucketedTerms, Encoding
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout


@dataclass(frozen=True, eq=False)
class PastTerms:
    """The terms of an encoding at the offsets ``1 - N … 0``.

    Args:
        bias: ``[H|1, N]``, the sum of the tables.
        buckets: of each term that reads the query, with the function that numbered them.
        values: rows of the value part ``[H|1, M, E]``, and the bucket of each offset.
    """

    bias: Float[Tensor, "h N"] | None = None
    buckets: tuple[tuple[Callable[..., Tensor], Int[Tensor, " N"]], ...] = ()
    values: tuple[tuple[Float[Tensor, "h M E"], Int[Tensor, " N"]], ...] = ()


def read_terms(
    encoding: Encoding, q: Tensor, v: Tensor, size: int, scale: float
) -> PastTerms | None:
    """The terms for ``size`` keys; None where some are not by offset alone."""
    if encoding.score is None and encoding.value is None:
        return PastTerms()
    device = q.device
    grid = Grid(
        Layout.sequence(1, size - 1, device=device), Layout.sequence(size, device=device), True
    ).in_precision_of(q)
    k = q.new_zeros(1, 1, 1, q.shape[3]).expand(q.shape[0], q.shape[1], size, -1)
    try:
        terms = lower(encoding, q, k, grid, scale=scale, value_dim=v.shape[3])
    except ArgumentError:  # a table that ends before
        return None
    score = encoding.score
    if terms is None or (score is not None and score.reads_layout):
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    biases, buckets, values = [], [], []
    for term in terms:
        if not isinstance(term, BucketedTerms) or term.right is not None or term.column is not None:
            return None
        bucket = term.bucket(grid.float_offsets(device=device).unsqueeze(-1))
        if term.table is not None:
            biases.append(term.table.to(wide)[:, bucket])
        if term.left is not None:
            buckets.append((term.bucket, bucket))
        if term.value is not None:
            values.append((term.value, bucket))
    if biases and (buckets or not getattr(score, "by_position", False)):
        return None  # a table beside what the query reads may depend on it
    bias = torch.stack(biases).sum(0) if biases else None
    return PastTerms(bias, tuple(buckets), tuple(values))
