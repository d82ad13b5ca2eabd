"""The block that every model stacks: attention and a feed-forward layer, each with a residual."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention import Attention, LayerCache
from posenc.errors import UnknownNameError
from posenc.layout import Layout

__all__ = ["Activation", "Block", "FeedForward", "Norm", "make_norm"]

Activation = Literal["swiglu", "gelu", "relu"]
Norm = Literal["rms", "layer"]


def make_norm(kind: Norm, dim: int) -> nn.Module:
    """RMSNorm (``"rms"``) or LayerNorm (``"layer"``) over ``dim`` features.

    Raises:
        UnknownNameError: for another kind.
    """
    if kind == "rms":
        return nn.RMSNorm(dim, eps=1e-6)
    if kind == "layer":
        return nn.LayerNorm(dim)
    raise UnknownNameError.of("norm", kind, ("rms", "layer"))


class FeedForward(nn.Module):
    """``W_o · a(W_i x)``; for SwiGLU ``W_o · (silu(W_g x) · W_i x)`` (Shazeer 2020).

    Args:
        dim: width C.
        hidden: width in between.
        activation: ``"swiglu"``, ``"gelu"`` or ``"relu"``.
        bias: the projections have biases.

    Raises:
        UnknownNameError: for another activation.
    """

    def __init__(
        self, *, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        if activation not in ("swiglu", "gelu", "relu"):
            raise UnknownNameError.of("activation", activation, ("swiglu", "gelu", "relu"))
        self.activation = activation
        gates = 2 if activation == "swiglu" else 1
        self.input = nn.Linear(dim, gates * hidden, bias=bias)
        self.output = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "B L C"]) -> Float[Tensor, "B L C"]:
        x = self.input(x)
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            x = nn.functional.silu(gate) * value
        elif self.activation == "gelu":
            x = nn.functional.gelu(x)
        else:
            x = torch.relu(x)
        projected: Tensor = self.output(x)
        return projected


class Block(nn.Module):
    """Attention, then feed-forward; each with dropout, a residual and a norm.

    Args:
        dim: width C.
        attention: the attention layer. Its encoding's embedding part enters here if it is one
            that enters every block: added to what queries, keys and values are made from.
        feed_forward: the other layer.
        norm: ``"rms"`` or ``"layer"``.
        norm_first: norms before each layer (pre-norm) rather than after each residual.
        dropout: probability of dropping a feature of either layer's output.
    """

    def __init__(
        self,
        *,
        dim: int,
        attention: Attention,
        feed_forward: FeedForward,
        norm: Norm = "rms",
        norm_first: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm, self.feed_forward_norm = make_norm(norm, dim), make_norm(norm, dim)
        self.norm_first = norm_first
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B L C"], layout: Layout, *, cache: LayerCache | None = None
    ) -> Float[Tensor, "B L C"]:
        """``x`` after both layers; with a cache, ``x`` is what follows the cached tokens."""
        if self.norm_first:
            x = x + self.dropout(self._attend(self.attention_norm(x), layout, cache))
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        else:
            x = self.attention_norm(x + self.dropout(self._attend(x, layout, cache)))
            x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x

    def _attend(self, x: Tensor, layout: Layout, cache: LayerCache | None) -> Tensor:
        encoding = self.attention.encoding
        if encoding.embedding is not None and encoding.embedding.every_layer:
            x = encoding.embed(x, layout) if cache is None else cache.embed(encoding, x, layout)
        attended: Tensor = self.attention(x, layout, cache=cache)
        return attended
