"""Computing with positions in float32 or better when weights are narrower."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.runtime import widest, without_autocast


class WideLinear(nn.Linear):
    """``nn.Linear`` in the dtype of its input, whatever the dtype of its weights or autocast's."""

    def forward(self, x: Float[Tensor, "*dims I"]) -> Float[Tensor, "*dims O"]:
        return wide_product(x, self.weight, self.bias)


class WideLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` in the dtype of its input, whatever the dtype of its weights."""

    def forward(self, x: Float[Tensor, "*dims I"]) -> Float[Tensor, "*dims I"]:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


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


def at_least_single(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """``x`` in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_zero_gradient(x: Tensor, parameter: Tensor) -> Tensor:
    """``x``, with a zero gradient for a parameter that the call does not use.

    DistributedDataParallel requires a gradient for every parameter.
    """
    return x + 0.0 * parameter.sum().to(x.dtype)
