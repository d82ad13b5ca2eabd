"""What the kernels compute with, as tensors: one record for the problem, one for its gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["DIFFERENTIABLE", "TENSORS", "Operands"]


@dataclass(frozen=True, eq=False)
class Operands:
    """Queries, keys, values, terms and marks of one problem.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``; of one dtype, as are all
            but the line, the column and the factors, which are float32.
        line: ``[H, N]``, by entry.
        left: ``[B, H, Q, F]``; left_rows: ``[h, N, F]``, h = H or 1.
        right: ``[B, H, K, F]``; right_rows: ``[h, N, F]``.
        column: ``[B, H, K]``.
        value_rows: ``[h, N, E]``.
        query_factor: ``[B, H, Q, R]``; key_factor: ``[B, H, K, R]``.
        query_label, key_label: ``[b, Q]`` and ``[b, K]``; pairs of different labels are hidden.
        query_order, key_order: likewise; what causality and windows go by. None: by place.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    line: Float[Tensor, "H N"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h N F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h N F"] | None = None
    column: Float[Tensor, "B H K"] | None = None
    value_rows: Float[Tensor, "h N E"] | None = None
    query_factor: Float[Tensor, "B H Q R"] | None = None
    key_factor: Float[Tensor, "B H K R"] | None = None
    query_label: Int[Tensor, "b Q"] | None = None
    key_label: Int[Tensor, "b K"] | None = None
    query_order: Int[Tensor, "b Q"] | None = None
    key_order: Int[Tensor, "b K"] | None = None

    @property
    def entries(self) -> int:
        """How many entries what depends on the offset has; 1 where there is no such thing."""
        tables = (self.line, self.left_rows, self.right_rows, self.value_rows)
        return max((table.shape[1] for table in tables if table is not None), default=1)

    @property
    def reads_offsets(self) -> bool:
        """Whether anything depends on the offset."""
        tables = (self.line, self.left_rows, self.right_rows, self.value_rows)
        return any(table is not None for table in tables)


TENSORS = tuple(field.name for field in fields(Operands))
DIFFERENTIABLE = TENSORS[: TENSORS.index("query_label")]
