"""Operands of the kernels: a record of tensors, and one of numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["DIFFERENTIABLE", "TENSORS", "Ends", "Operands", "Options", "empty_as"]


@dataclass(frozen=True, eq=False)
class Operands:
    """Queries, keys, values, terms and segments of one problem.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``; of one dtype, as are all
            but the offset bias, the column and the factors, which are float32.
        bias_by_offset: ``[H, N]``, by entry.
        left: ``[B, H, Q, F]``; left_rows: ``[h, N, F]``, h = H or 1.
        right: ``[B, H, K, F]``; right_rows: ``[h, N, F]``.
        column: ``[B, H, K]``.
        value_rows: ``[h, N, E]``.
        query_factor: ``[B, H, Q, R]``; key_factor: ``[B, H, K, R]``.
        curve_numbers: ``[1, N]``, by entry; curve_rates: ``[b, Q]``; curve_slope, curve_intercept:
            ``[H, M]``; curve_knots: ``[M - 1]``; float32. As of ``arguments.Curve``.
        query_segment_ids, key_segment_ids: ``[b, Q]`` and ``[b, K]``; pairs of
            different segments are hidden.
        query_order, key_order: likewise; what causality and windows go by. None: by place.
        query_summary, key_summary: ``[b, n, 4]`` int64, least and greatest order and segment of
            each granule of tokens; where there are segments.
        query_rotary: ``[b, h, Q, 2T]``, h = H or 1, cosines and then sines of each pair of features
            of the queries, float32; key_rotary: ``[b, g, K, 2T]``. None: nothing is rotated.
        seed: ``[1]`` int64, of dropout; on the device, so that each replay of a graph draws anew.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    bias_by_offset: Float[Tensor, "H N"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h N F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h N F"] | None = None
    column: Float[Tensor, "B H K"] | None = None
    value_rows: Float[Tensor, "h N E"] | None = None
    query_factor: Float[Tensor, "B H Q R"] | None = None
    key_factor: Float[Tensor, "B H K R"] | None = None
    curve_numbers: Float[Tensor, "1 N"] | None = None
    curve_rates: Float[Tensor, "b Q"] | None = None
    curve_slope: Float[Tensor, "H M"] | None = None
    curve_intercept: Float[Tensor, "H M"] | None = None
    query_segment_ids: Int[Tensor, "b Q"] | None = None
    key_segment_ids: Int[Tensor, "b K"] | None = None
    query_order: Int[Tensor, "b Q"] | None = None
    key_order: Int[Tensor, "b K"] | None = None
    query_summary: Int[Tensor, "b nQ 4"] | None = None
    key_summary: Int[Tensor, "b nK 4"] | None = None
    query_rotary: Float[Tensor, "b h Q 2*T"] | None = None
    key_rotary: Float[Tensor, "b g K 2*T"] | None = None
    curve_knots: Float[Tensor, " M-1"] | None = None
    seed: Int[Tensor, "1"] | None = None

    @property
    def entries(self) -> int:
        """Number of entries of the tables by offset; 1 where there are none."""
        return max((table.shape[1] for table in self._tables()), default=1)

    @property
    def reads_offsets(self) -> bool:
        """True if anything depends on the offset."""
        return bool(self._tables())

    def _tables(self) -> list[Tensor]:
        """Those by offset."""
        tables = (self.bias_by_offset, self.left_rows, self.right_rows, self.value_rows)
        return [x for x in (*tables, self.curve_numbers) if x is not None]


@dataclass(frozen=True)
class Options:
    """Numbers of a problem.

    Args:
        origin, first, last: as in ``Band``. zero: the entry of offset 0, or the nearest to it.
        causal, window: where segments or orders are given token by token; False and None otherwise.
        scale: of the product of queries and keys.
        dropout: of weights.
        adjacent: pairs that are rotated are neighbours; else halves apart.
        tuned: tile sizes are measured; else the first that may fit are taken.
    """

    origin: int
    first: int
    last: int
    causal: bool
    window: int | None
    scale: float
    dropout: float
    adjacent: bool = False
    tuned: bool = True
    zero: int = 0


@dataclass(frozen=True, eq=False)
class Ends:
    """A number a token for the first entry of the tables, and one for the last: ``[B, H, L]``."""

    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: int, heads: int, length: int, *, like: Tensor) -> Ends:
        """Room for them."""
        size = (2, batch, heads, length)
        first, last = like.new_empty(size, dtype=torch.float32).unbind(0)
        return cls(first, last)


def empty_as(x: Float[Tensor, "B H L D"], width: int) -> Float[Tensor, "B H L E"]:
    """Room for vectors of the same tokens, their heads in the order in which ``x`` holds them.

    ``[B, L, H, D]``, transposed, is how projections leave them and take them.
    """
    batch, heads, length, _ = x.shape
    if x.transpose(1, 2).is_contiguous():
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)


TENSORS = tuple(field.name for field in fields(Operands))
DIFFERENTIABLE = TENSORS[: TENSORS.index("query_segment_ids")]
