"""Dynamic position biases."""

from __future__ import annotations

from dataclasses import InitVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Width
from posenc.encoding import Entry
from posenc.encodings.common.buckets import OffsetBias
from posenc.encodings.common.precision import WideLayerNorm, WideLinear


class DynamicBias(OffsetBias):
    """Dynamic position bias: a small MLP of the offset gives one bias per head.

    ``s_ij += f_h(u)``, ``u = -Δ`` or, with ``log_distance``, ``-sign(Δ) · log(|Δ| + 1)``.

    Δ = j - i in tokens, any real; f: a number, ``depth`` hidden layers (linear, LayerNorm if
    ``norm``, SiLU), H logits. Differs from CrossFormer, which has it on images (there ReLU with
    LayerNorm), as x-transformers does; from x-transformers in nothing.

    Args:
        heads: H.
        dim: width C of the model.
        hidden: width of the hidden layers; C / 4 by default, or 16 a head without ``dim``.
        depth: hidden layers.
        log_distance: use the logarithm of the distance. Raw distances beyond the trained ones are
            outside the network's training range.
        norm: hidden layers have a LayerNorm.

    Raises:
        ArgumentError: when ``heads``, ``hidden`` or ``depth`` is below 1.

    Reference: Wang et al. 2021, "CrossFormer: A Versatile Vision Transformer Hinging on Cross-scale
    Attention", https://arxiv.org/abs/2108.00154.

    >>> import posenc, torch
    >>> bias = posenc.create("dynamic_bias", heads=6, dim=48).score
    >>> bias.bias(torch.tensor([-2.5, 0.0])).shape
    torch.Size([6, 2])
    """

    heads: Count
    dim: InitVar[Width | None] = None
    hidden: Width | None = None
    depth: Count = 2
    log_distance: bool = False
    norm: bool = False

    def __post_init__(self, dim: int | None) -> None:
        default = 16 * self.heads if dim is None else max(1, dim // 4)
        hidden = self.hidden or default
        self.layers = nn.ModuleList(
            _Hidden(hidden if place else 1, hidden, norm=self.norm) for place in range(self.depth)
        )
        self.output = WideLinear(hidden, self.heads)

    def reset_parameters(self) -> None:
        """Draw initial values, as PyTorch does for linear layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, "H *dims"]:
        read = -offset
        if self.log_distance:
            read = read.sign() * torch.log(read.abs() + 1)
        features = read.unsqueeze(-1)
        for layer in self.layers:
            features = layer(features)
        logits: Tensor = self.output(features)
        return logits.movedim(-1, 0)


class _Hidden(nn.Module):
    """Linear, LayerNorm if ``norm``, SiLU, in the dtype of what comes in."""

    def __init__(self, width: int, hidden: int, *, norm: bool) -> None:
        super().__init__()
        self.linear = WideLinear(width, hidden)
        self.norm = WideLayerNorm(hidden) if norm else None

    def forward(self, x: Float[Tensor, "*dims I"]) -> Float[Tensor, "*dims O"]:
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        return nn.functional.silu(x)


ENTRY = Entry(
    factory=DynamicBias,
    summary="Gives each head's bias by a small MLP of the offset.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length; less so with log_distance.",
    cost="Q·K·(depth·hidden² + H); a table of Q + K offsets on regular layouts",
    sharing="layers",
)
