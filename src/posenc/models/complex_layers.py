"""Layers of complex-valued models.

Weights are kept as real numbers (real parts, then imaginary ones), so that optimisers, dtypes and
checkpoints treat them as any others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from posenc.attention import LayerCache, attend_complex
from posenc.attention.extra.complex import ComplexProduct, side_by_side
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import zero_invalid

__all__ = ["ComplexAttention", "ComplexConv", "ComplexFeedForward", "ComplexLinear", "folded"]


def folded(x: Float[Tensor, "*dims 2*T"]) -> Complex[Tensor, "*dims T"]:
    """Complex numbers from their real parts, then their imaginary ones."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def on_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of the real and of the imaginary part, each by itself; or of a real tensor."""
    return torch.complex(function(x.real), function(x.imag)) if x.is_complex() else function(x)


class ComplexLinear(nn.Module):
    """``W x + b`` with complex W and b.

    Args:
        inputs, outputs: complex numbers of each.
        bias: b is there.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(2, outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W with E|W|² one over the inputs, so that |x| keeps its size; b is 0."""
        nn.init.normal_(self.weight, std=(2 * self.weight.shape[-1]) ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Complex[Tensor, "*dims T"]) -> Complex[Tensor, "*dims S"]:
        """The product, over the last dimension."""
        bias = None if self.bias is None else torch.complex(*self.bias)
        return nn.functional.linear(x, torch.complex(*self.weight), bias)


class ComplexConv(nn.Module):
    """A convolution along a sequence with complex weights, zeros beyond its ends.

    Args:
        inputs, outputs: complex channels of each.
        kernel: tokens it reads, odd.
    """

    def __init__(self, inputs: int, outputs: int, *, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, outputs, inputs, kernel))
        self.bias = nn.Parameter(torch.zeros(2, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``ComplexLinear``, of ``inputs · kernel`` inputs."""
        nn.init.normal_(self.weight, std=(2 * self.weight[0, 0].numel()) ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Complex[Tensor, "B T L"]) -> Complex[Tensor, "B S L"]:
        """``[B, outputs, L]``."""
        weight, bias = torch.complex(*self.weight), torch.complex(*self.bias)
        return nn.functional.conv1d(x, weight, bias, padding=self.weight.shape[-1] // 2)


class ComplexFeedForward(nn.Module):
    """``W_o · relu(W_i x)``, ReLU of the real and of the imaginary part, each by itself.

    Args:
        dim: complex numbers T of a token.
        hidden: complex numbers in between.
    """

    def __init__(self, *, dim: int, hidden: int) -> None:
        super().__init__()
        self.input, self.output = ComplexLinear(dim, hidden), ComplexLinear(hidden, dim)

    def forward(self, x: Complex[Tensor, "B L T"]) -> Complex[Tensor, "B L T"]:
        projected: Tensor = self.output(on_parts(torch.relu, self.input(x)))
        return projected


class ComplexAttention(nn.Module):
    """Multi-head self-attention of complex vectors, in place of ``Attention`` in a ``Block``.

    Args:
        dim: complex numbers T of a token.
        heads: H.
        encoding: its parts see heads as 2D real numbers, ``2T / H`` (see ``attend_complex``).
        product: how the logit is made real; see ``attend_complex``.

    Raises:
        ArgumentError: when heads do not divide, or the encoding needs a causal mask; in
            ``forward``, on a context or a cache, which it does not serve.
    """

    def __init__(
        self, *, dim: int, heads: int, encoding: Encoding, product: ComplexProduct = "real"
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ArgumentError(
                "dim", expected=f"a multiple of heads ({heads})", got=dim, remedy="Change either."
            )
        if encoding.causal_only:
            raise ArgumentError(
                "encoding",
                expected="one that means something where tokens see both sides",
                got="one that only counts what came before",
                remedy="Use another one.",
            )
        self.heads, self.encoding = heads, encoding
        self.product: ComplexProduct = product
        self.query, self.key, self.value, self.output = (
            ComplexLinear(dim, dim, bias=False) for _ in range(4)
        )

    def refer_to(self, encoding: Encoding) -> None:
        """Use an encoding that belongs to another module; see ``Attention``."""
        self._modules.pop("encoding", None)
        object.__setattr__(self, "encoding", encoding)

    def forward(
        self,
        x: Complex[Tensor, "B L T"],
        layout: Layout,
        *,
        context: Tensor | None = None,
        context_layout: Layout | None = None,
        cache: LayerCache | None = None,
    ) -> Complex[Tensor, "B L T"]:
        """Attend from ``x`` to itself."""
        if context is not None or context_layout is not None or cache is not None:
            raise ArgumentError(
                "context",
                expected="none, and no cache: complex models classify whole sequences",
                got="one",
                remedy="Use posenc.Attention with real vectors.",
            )
        x = zero_invalid(x, layout)
        layout = self.encoding.observe(side_by_side(x), layout)
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = attend_complex(q, k, v, Grid.of(layout), self.encoding, product=self.product)
        merged: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return merged
