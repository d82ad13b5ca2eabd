"""Keeping positions in float32 when a module's weights are narrower."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["wide_linear"]


def wide_linear(x: Float[Tensor, "*dims I"], layer: nn.Linear) -> Float[Tensor, "*dims O"]:
    """``layer`` applied in the dtype of ``x``, whatever the dtype of its weights."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return nn.functional.linear(x, layer.weight.to(x.dtype), bias)
