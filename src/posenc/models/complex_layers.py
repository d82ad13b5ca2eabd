"""Layers of complex-valued models.

Weights are stored as real numbers (real parts, then imaginary parts), for optimisers, dtypes and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from posenc.attention import LayerCache, attend_complex
from posenc.attention.extra.complex import ComplexProduct, side_by_side
from posenc.encoding import Encoding
from posenc.encoding.parts import require_causal
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import zero_invalid


def folded(x: Float[Tensor, "*dims 2*T"]) -> Complex[Tensor, "*dims T"]:
    """Complex numbers from concatenated real and imaginary parts."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def on_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` applied to real and imaginary parts separately."""
    return torch.complex(function(x.real), function(x.imag))


class ComplexLinear(nn.Module):
    """``W x + b`` with complex W and b.

    Args:
        inputs, outputs: numbers of complex features.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(2, outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise W with E|W|² = 1 / inputs and b with 0."""
        nn.init.normal_(self.weight, std=(2 * self.weight.shape[-1]) ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Complex[Tensor, "*dims T"]) -> Complex[Tensor, "*dims S"]:
        """``W x + b`` over the last dimension."""
        bias = None if self.bias is None else torch.complex(*self.bias)
        return nn.functional.linear(x, torch.complex(*self.weight), bias)


class ComplexConv(nn.Module):
    """A convolution along a sequence with complex weights and zero padding.

    Args:
        inputs, outputs: numbers of complex channels.
        kernel: odd kernel size.
    """

    def __init__(self, inputs: int, outputs: int, *, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, outputs, inputs, kernel))
        self.bias = nn.Parameter(torch.zeros(2, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise W with E|W|² = 1 / (inputs · kernel) and b with 0."""
        nn.init.normal_(self.weight, std=(2 * self.weight[0, 0].numel()) ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Complex[Tensor, "B T L"]) -> Complex[Tensor, "B S L"]:
        """The convolved sequence, ``[B, outputs, L]``."""
        weight, bias = torch.complex(*self.weight), torch.complex(*self.bias)
        return nn.functional.conv1d(x, weight, bias, padding=self.weight.shape[-1] // 2)


class ComplexFeedForward(nn.Module):
    """``W_o · relu(W_i x)``, with ReLU applied to real and imaginary parts separately.

    Args:
        dim: complex numbers T of a token.
        hidden: complex width of the hidden layer.
    """

    def __init__(self, *, dim: int, hidden: int) -> None:
        super().__init__()
        self.input, self.output = ComplexLinear(dim, hidden), ComplexLinear(hidden, dim)

    def forward(self, x: Complex[Tensor, "B L T"]) -> Complex[Tensor, "B L T"]:
        projected: Tensor = self.output(on_parts(torch.relu, self.input(x)))
        return projected


class ComplexAttention(nn.Module):
    """Multi-head self-attention of complex vectors, for use in a ``Block``.

    Args:
        dim: complex numbers T of a token.
        heads: H.
        encoding: applied to heads as ``2T / H`` real numbers (see ``attend_complex``).
        product: see ``attend_complex``.

    Raises:
        ArgumentError: if heads do not divide ``dim``, or the encoding requires a causal mask; in
            ``forward``, for a context or a cache.
    """

    def __init__(
        self, *, dim: int, heads: int, encoding: Encoding, product: ComplexProduct = "real"
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ArgumentError(
                "dim", expected=f"a multiple of heads ({heads})", got=dim, remedy="Change either."
            )
        require_causal(encoding.parts(), causal=False)
        self.heads, self.encoding = heads, encoding
        self.product: ComplexProduct = product
        self.query, self.key, self.value, self.output = (
            ComplexLinear(dim, dim, bias=False) for _ in range(4)
        )

    def refer_to(self, encoding: Encoding) -> None:
        """Use an encoding owned by another module; see ``Attention``."""
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
        """Self-attention of ``x``."""
        if context is not None or context_layout is not None or cache is not None:
            raise ArgumentError(
                "context",
                expected="no context and no cache",
                got="one",
                remedy="Use posenc.Attention with real vectors.",
            )
        x = zero_invalid(x, layout)
        layout = self.encoding.observe(side_by_side(x), layout)
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = attend_complex(q, k, v, Grid.of(layout), self.encoding, product=self.product)
        merged: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return merged
