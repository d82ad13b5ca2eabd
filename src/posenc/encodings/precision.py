"""Keeping positions in float32 when a module's weights are narrower."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["wide_linear", "wide_product", "wider", "widest", "without_autocast"]


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operands keep their dtypes; the meta device has no autocast to leave."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def wide_linear(x: Float[Tensor, "*dims I"], layer: nn.Linear) -> Float[Tensor, "*dims O"]:
    """``layer`` applied in the dtype of ``x``, whatever the dtype of its weights or autocast's."""
    return wide_product(x, layer.weight, layer.bias)


def wide_product(
    x: Float[Tensor, "*dims I"],
    weight: Float[Tensor, "O I"],
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*dims O"]:
    """``x weightᵀ + bias`` in the dtype of ``x``, whatever that of the weights or autocast's."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    with without_autocast(x.device):
        return nn.functional.linear(x, weight, bias)


def wider(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """``x`` in float64 where its device has it, else in float32."""
    return x.to(widest(x.device))


def widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64
