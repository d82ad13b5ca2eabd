"""Norms over the features of a token."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from posenc.errors import ArgumentError, UnknownNameError
from posenc.layout import Layout

__all__ = ["BatchNorm", "ComplexNorm", "Norm", "make_norm", "normalize"]

Norm = Literal["rms", "layer", "batch", "complex"]


class BatchNorm(nn.Module):
    """``(x - mean) / √(variance + eps) · weight + bias``, each feature over all real tokens.

    In training mean and variance are those of the batch's real tokens (padding counts for
    nothing), and running averages of them are kept; in evaluation the averages are used, and a
    token depends on no other. In training every token depends on every other, later ones
    included: a causal model learns from statistics that hold a little of the future.

    Args:
        dim: features C.
        momentum: what a batch adds to the running averages.
        eps: see above.
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

    def forward(self, x: Float[Tensor, "B L C"], layout: Layout) -> Float[Tensor, "B L C"]:
        """``x`` normalised, padding with the same statistics."""
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance, count = _statistics(x, layout)
            with torch.no_grad():
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
                self.variance.lerp_(unbiased.to(self.variance.dtype), self.momentum)
        normal = (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return normal.to(x.dtype)


def _statistics(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each feature over the real tokens, and how many these are."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    valid = layout.valid
    if valid is None:
        count = torch.tensor(x.shape[0] * x.shape[1], device=x.device)
        return wide.mean((0, 1)), wide.var((0, 1), correction=0), count
    valid = valid.expand(x.shape[:2]).unsqueeze(-1)
    count = valid.sum().clamp(min=1)
    mean = wide.masked_fill(~valid, 0).sum((0, 1)) / count
    variance = (wide - mean).masked_fill(~valid, 0).square().sum((0, 1)) / count
    return mean, variance, count


class ComplexNorm(nn.Module):
    """``(x - mean) / √(mean |x - mean|² + eps) · weight + bias`` over complex features.

    ``weight`` is real and ``bias`` complex, kept as its real parts and its imaginary ones.

    Args:
        dim: complex features.
        eps: see above.
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
            ArgumentError: when it is real.
        """
        if not x.is_complex():
            raise ArgumentError(
                "x", expected="a complex dtype", got=x.dtype, remedy='Use norm="layer" for it.'
            )
        centred = x - x.mean(-1, keepdim=True)
        power = (centred.real.square() + centred.imag.square()).mean(-1, keepdim=True)
        return centred * ((power + self.eps).rsqrt() * self.weight) + torch.complex(*self.bias)


def make_norm(kind: Norm, dim: int, *, eps: float | None = None) -> nn.Module:
    """RMSNorm (``"rms"``), LayerNorm (``"layer"``), ``BatchNorm`` (``"batch"``) or ``ComplexNorm``.

    Args:
        kind: which.
        dim: features.
        eps: what is added to the variance; 1e-6 for RMSNorm and 1e-5 for the others by default.

    Raises:
        UnknownNameError: for another kind.
    """
    if kind == "rms":
        return nn.RMSNorm(dim, eps=1e-6 if eps is None else eps)
    eps = 1e-5 if eps is None else eps
    if kind == "layer":
        return nn.LayerNorm(dim, eps=eps)
    if kind == "batch":
        return BatchNorm(dim, eps=eps)
    if kind == "complex":
        return ComplexNorm(dim, eps=eps)
    raise UnknownNameError.of("norm", kind, ("rms", "layer", "batch", "complex"))


def normalize(norm: nn.Module, x: Float[Tensor, "B L C"], layout: Layout) -> Tensor:
    """``norm`` of ``x``; one that looks at other tokens is told which of them are real."""
    normal: Tensor = norm(x, layout) if isinstance(norm, BatchNorm) else norm(x)
    return normal
