"""Layers beside the blocks: normalisation, and token embedding that is also the output layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from posenc.arguments import check
from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout import Layout

Norm = Literal["rms", "layer", "batch", "complex"]


class BatchNorm(nn.Module):
    """``(x - mean) / √(variance + eps) · weight + bias``, each feature over all valid tokens.

    Training uses the statistics of the batch's valid tokens and updates running averages, which
    evaluation uses. In training every token therefore depends on all others, even in a causal
    model.

    Args:
        dim: features C.
        momentum: weight of a batch in the running averages.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, dim: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, momentum={self.momentum:g}, eps={self.eps:g}"

    def forward(self, x: Features, layout: Layout) -> Features:
        """``x`` normalised (padding with the same statistics)."""
        mean, variance = self.mean, self.variance
        if self.training:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            hidden = torch.zeros(1, dtype=torch.bool, device=x.device)
            if layout.valid is not None:
                hidden = ~layout.valid
            hidden = hidden.expand(x.shape[:2]).unsqueeze(-1)
            count = (~hidden).sum().clamp(min=1)
            mean = wide.masked_fill(hidden, 0).sum((0, 1)) / count
            variance = (wide - mean).masked_fill(hidden, 0).square().sum((0, 1)) / count
            with torch.no_grad():
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
                self.variance.lerp_(unbiased.to(self.variance.dtype), self.momentum)
        normal = (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return normal.to(x.dtype)


class ComplexNorm(nn.Module):
    """``(x - mean) / √(mean |x - mean|² + eps) · weight + bias`` over complex features.

    ``weight`` is real; ``bias`` is stored as its real parts, then its imaginary parts.

    Args:
        dim: complex features.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(2, dim))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps:g}"

    def forward(self, x: Complex[Tensor, "*dims T"]) -> Complex[Tensor, "*dims T"]:
        """``x`` normalised.

        Raises:
            ArgumentError: if it is real.
        """
        if not x.is_complex():
            raise ArgumentError(
                "x", expected="a complex dtype", got=x.dtype, remedy='Use norm="layer" instead.'
            )
        centred = x - x.mean(-1, keepdim=True)
        power = (centred.real.square() + centred.imag.square()).mean(-1, keepdim=True)
        return centred * ((power + self.eps).rsqrt() * self.weight) + torch.complex(*self.bias)


NORMS: dict[Norm, Callable[..., nn.Module]] = {
    "rms": nn.RMSNorm,
    "layer": nn.LayerNorm,
    "batch": BatchNorm,
    "complex": ComplexNorm,
}


def make_norm(kind: Norm, dim: int, *, eps: float | None = None) -> nn.Module:
    """RMSNorm, LayerNorm, ``BatchNorm`` or ``ComplexNorm``.

    Args:
        kind: ``"rms"``, ``"layer"``, ``"batch"`` or ``"complex"``.
        eps: added to the variance; by default 1e-6 for RMSNorm, else 1e-5.

    Raises:
        UnknownNameError: for another kind.
    """
    if eps is None:
        eps = 1e-6 if kind == "rms" else 1e-5
    return NORMS[check("norm", Norm, kind)](dim, eps=eps)


def normalize(norm: nn.Module, x: Features, layout: Layout) -> Tensor:
    """``norm`` of ``x``; ``BatchNorm`` also gets the layout."""
    normal: Tensor = norm(x, layout) if isinstance(norm, BatchNorm) else norm(x)
    return normal


class TokenEmbedding(nn.Embedding):
    """Embedding E of token ids; for vectors x, the logits ``E x``.

    Both are calls of the module, so hooks that gather or load the weight run for either.
    """

    def forward(self, x: Int[Tensor, "*places"] | Float[Tensor, "*places C"]) -> Tensor:
        """``[..., C]`` for ids, ``[..., V]`` for vectors."""
        if x.is_floating_point():
            return nn.functional.linear(x, self.weight)
        try:
            return super().forward(x)
        except IndexError as error:
            raise ArgumentError(
                "tokens",
                expected=f"ids from 0 to {self.num_embeddings - 1}",
                got=f"{int(x.min())} to {int(x.max())}",
                remedy="Use the tokenizer of the model; padding too takes an id.",
            ) from error


def tied_logits(
    embedding: nn.Module, x: Float[Tensor, "*places C"], count: int
) -> Float[Tensor, "*places V"]:
    """Logits ``E x``, E the vectors of ``embedding``.

    Args:
        embedding: a ``TokenEmbedding``, or a module of another kind (an adapter) that maps ids.
        x: ``[..., C]``.
        count: V, the number of ids.
    """
    if isinstance(embedding, TokenEmbedding):
        logits: Tensor = embedding(x)
        return logits
    return nn.functional.linear(x, embedding(torch.arange(count, device=x.device)))
