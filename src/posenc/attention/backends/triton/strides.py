"""Orders of tensors in memory that the kernels read and write."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def features_together(x: Tensor) -> Tensor:
    """The tensor in a memory order that the kernels can read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_as(x: Float[Tensor, "B H L D"], width: int) -> Float[Tensor, "B H L E"]:
    """Room for vectors of the same tokens, their heads in the order in which ``x`` holds them.

    ``[B, L, H, D]``, transposed, is how projections leave them and take them.
    """
    batch, heads, length, _ = x.shape
    if x.transpose(1, 2).is_contiguous():
        return x.new_empty(batch, length, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, length, width)
