"""Kernelised relative positions."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count
from posenc.encoding import Entry
from posenc.encodings.common.buckets import OffsetBias
from posenc.errors import ArgumentError
from posenc.runtime import has_values

Kernel = Literal["log", "power"]

LEAST = 1e-2
"""Initial values are at least this, as in the authors' code."""


class Kerple(OffsetBias):
    """KERPLE: a penalty by distance whose shape, a kernel with two parameters a head, is learned.

    ``s_ij += -r1_h · log(1 + r2_h |Δ|)`` (``kernel="log"``) or ``-r1_h · |Δ|^(r2_h)``
    (``"power"``).

    Δ = j - i in tokens, any real; r1 ``[H]`` in logits, r2 ``[H]`` per token (log) or an exponent
    in (0, 2] (power), all positive. Differs from the authors' code in holding r1 and r2 in their
    domain by parametrisation rather than by clamping after each step. With exponents fixed at 1 and
    ALiBi's slopes it is ALiBi.

    Args:
        heads: H.
        kernel: ``"log"`` or ``"power"``. Log extrapolates better in the paper.

    Raises:
        ArgumentError: when ``heads`` is below 1.
        UnknownNameError: for another ``kernel``.

    Reference: Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length
    Extrapolation", https://arxiv.org/abs/2205.09921.

    >>> import posenc, torch
    >>> kerple = posenc.create("kerple", heads=8).score
    >>> kerple.bias(torch.tensor([0.0]))[0].tolist()
    [-0.0]
    """

    heads: Count
    kernel: Kernel = "log"

    def __post_init__(self) -> None:
        self.raw_scale, self.raw_shape = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))

    def reset_parameters(self) -> None:
        """Draw initial values, uniform as in the authors' code.

        r1 and r2 are below 2 and 1 for the log kernel, below 1 and 2 for the power kernel.
        """
        limits = (2.0, 1.0) if self.kernel == "log" else (1.0, 2.0)
        scale, shape = (
            torch.empty_like(raw).uniform_(0, limit).clamp_(min=LEAST)
            for raw, limit in zip((self.raw_scale, self.raw_shape), limits, strict=True)
        )
        self.set_kernel(scale, shape)

    def set_kernel(self, scale: Float[Tensor, " H"], shape: Float[Tensor, " H"]) -> None:
        """Put ``r1 = scale`` and ``r2 = shape``.

        Raises:
            ArgumentError: when one is out of its domain.
        """
        most = float("inf") if self.kernel == "log" else 2.0
        fits = (scale > 0).all() & ((shape > 0) & (shape <= most)).all()
        if has_values(scale) and not bool(fits):
            raise ArgumentError(
                "scale, shape",
                expected="positive numbers" + (", shape up to 2" if most == 2.0 else ""),
                got=f"{scale.tolist()} and {shape.tolist()}",
                remedy="Keep both in the kernel's domain.",
            )
        with torch.no_grad():
            self.raw_scale.copy_(scale.log())
            self.raw_shape.copy_(shape.log() if self.kernel == "log" else (shape / 2).logit(1e-6))

    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, "H *dims"]:
        distance = offset.abs()
        column = (-1, *(1,) * offset.dim())
        scale = self.raw_scale.to(distance.dtype).exp().view(column)
        raw = self.raw_shape.to(distance.dtype).view(column)
        if self.kernel == "log":
            return -scale * torch.log1p(raw.exp() * distance)
        return -scale * distance ** (2 * raw.sigmoid())


ENTRY = Entry(
    factory=Kerple,
    summary="Lowers the logits by a learned logarithm or power of distance.",
    relative=True,
    trainable=True,
    extrapolates="Holds far past the training length; the log kernel best.",
    cost="Q·K·H; a table of Q + K offsets on regular layouts",
    sharing="layers",
)
