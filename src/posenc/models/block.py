"""Transformer block: attention, cross-attention and feed-forward layers with residuals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import check
from posenc.attention import Attention, Context, LayerCache
from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.padding import zero_invalid
from posenc.models.complex_layers import ComplexAttention, ComplexFeedForward
from posenc.models.layers import Norm, make_norm, normalize

Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]

GATED = ("swiglu", "geglu")

_gelu_tanh = partial(nn.functional.gelu, approximate="tanh")

FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": _gelu_tanh,
    "gelu": nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": torch.relu,
}


class FeedForward(nn.Module):
    """``W_o · a(W_i x)``; with gates ``W_o · (a(W_g x) · W_i x)`` (Shazeer 2020).

    Args:
        dim: width C.
        hidden: width of the hidden layer.
        activation: gated: ``"swiglu"`` (a is SiLU) or ``"geglu"`` (a is tanh GELU); without
            gates: ``"gelu"``, ``"gelu_tanh"`` (its approximation by tanh) or ``"relu"``.
        bias: add biases.

    Raises:
        UnknownNameError: for another activation.
    """

    def __init__(
        self, *, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        self.activation: Activation = check("activation", Activation, activation)
        gates = 2 if activation in GATED else 1
        self.input = nn.Linear(dim, gates * hidden, bias=bias)
        self.output = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Features) -> Features:
        x, function = self.input(x), FUNCTIONS[self.activation]
        if self.activation in GATED:
            gate, value = x.chunk(2, dim=-1)
            x = function(gate) * value
        else:
            x = function(x)
        projected: Tensor = self.output(x)
        return projected


class SourceContext:
    """Source of one block's cross-attention, projected in the block's ``forward``.

    There, sharding and offloading have gathered the parameters. Without gradients the projected
    keys and values are cached.

    Args:
        vectors: ``[B, K, C]``, of another sequence.
        layout: of the vectors.
    """

    def __init__(self, vectors: Float[Tensor, "B K C"], layout: Layout) -> None:
        self.vectors, self.layout = vectors, layout
        self._cached: Context | None = None

    def project(self, attention: Attention) -> Context:
        """Keys and values projected by ``attention``, the same layer in every call."""
        if torch.is_grad_enabled():
            return attention.project(self.vectors, self.layout)
        if self._cached is None:
            self._cached = attention.project(self.vectors, self.layout)
        return self._cached

    def select(self, rows: Int[Tensor, " rows"]) -> SourceContext:
        """The context of the given batch rows, possibly repeated (beam search)."""
        selected = SourceContext(self.vectors[rows], self.layout.select(rows))
        selected._cached = None if self._cached is None else self._cached.select(rows)
        return selected


class Block(nn.Module):
    """Attention, optional cross-attention and feed-forward, each with a residual and a norm.

    Args:
        dim: width C.
        attention: self-attention. An embedding part of its encoding that enters every block is
            applied to its input. Attention and feed-forward may be complex with
            ``norm="complex"``.
        cross: attention to a context.
        norm: ``"rms"``, ``"layer"``, ``"batch"`` or ``"complex"``.
        norm_first: norms before each layer (pre-norm), not after each residual.
        parallel: attention and feed-forward both read the block's input, each with its own norm,
            and are added to it (GPT-NeoX).
        norm_eps: see ``make_norm``.
        dropout: of the layers' outputs.

    Raises:
        ArgumentError: if the cross-attention's encoding has an embedding part, or ``parallel`` is
            combined with post-norm or cross-attention.
    """

    def __init__(
        self,
        *,
        dim: int,
        attention: Attention | ComplexAttention,
        feed_forward: FeedForward | ComplexFeedForward,
        cross: Attention | None = None,
        norm: Norm = "rms",
        norm_first: bool = True,
        parallel: bool = False,
        norm_eps: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward, self.cross = attention, feed_forward, cross
        self.attention_norm = make_norm(norm, dim, eps=norm_eps)
        self.feed_forward_norm = make_norm(norm, dim, eps=norm_eps)
        self.cross_norm = None if cross is None else make_norm(norm, dim, eps=norm_eps)
        if cross is not None and cross.encoding.embedding is not None:
            raise ArgumentError(
                "cross",
                expected="an encoding without an embedding part",
                got=f"{type(cross.encoding.embedding).__name__}, which changes token vectors",
                remedy="Use it as the encoding of the encoder or the decoder.",
            )
        if parallel and (cross is not None or not norm_first):
            raise ArgumentError(
                "parallel",
                expected="pre-norm without cross-attention",
                got="post-norm" if cross is None else "a cross-attention",
                remedy="Use parallel=False.",
            )
        self.norm_first, self.parallel = norm_first, parallel
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Features,
        layout: Layout,
        *,
        cache: LayerCache | None = None,
        source: Features | None = None,
        context: Context | SourceContext | None = None,
    ) -> Features:
        """``x`` after all layers.

        Args:
            x: ``[B, L, C]`` token vectors; with a cache, those that follow the cached ones.
            layout: of the tokens. Features of invalid tokens are replaced by zeros.
            cache: of the self-attention.
            source: input of the self-attention's keys and values, ``x`` by default (DeBERTa's
                decoding layers).
            context: of the cross-attention, projected or to be projected.

        Raises:
            ArgumentError: for a context without cross-attention, or the reverse.
        """
        if (context is None) != (self.cross is None):
            raise ArgumentError(
                "context",
                expected="one if and only if the block has cross-attention",
                got="none" if context is None else "one",
                remedy="Pass SourceContext(vectors, layout), or omit it.",
            )
        if self.cross is not None and isinstance(context, SourceContext):
            context = context.project(self.cross)
        x = zero_invalid(x, layout)
        source = None if source is None else zero_invalid(source, layout)
        if source is not None and self.norm_first:
            source = normalize(self.attention_norm, source, layout)
        block_input = x
        attend = partial(self._attend, layout=layout, cache=cache, source=source)
        x = self._residual(x, self.attention_norm, layout, attend)
        if self.parallel:
            normal = normalize(self.feed_forward_norm, block_input, layout)
            return x + self._dropped(self.feed_forward(normal))
        if self.cross is not None and self.cross_norm is not None:
            cross = partial(self.cross, layout=layout, context=context)
            x = self._residual(x, self.cross_norm, layout, cross)
        return self._residual(x, self.feed_forward_norm, layout, self.feed_forward)

    def _residual(
        self, x: Tensor, norm: nn.Module, layout: Layout, layer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """``x`` plus a layer of it, with the norm before the layer or after the sum."""
        if self.norm_first:
            return x + self._dropped(layer(normalize(norm, x, layout)))
        return normalize(norm, x + self._dropped(layer(x)), layout)

    def _dropped(self, x: Tensor) -> Tensor:
        """``x`` after dropout, without calling it where there is none."""
        dropped: Tensor = self.dropout(x) if self.dropout.training else x
        return dropped

    def _attend(
        self, x: Tensor, layout: Layout, cache: LayerCache | None, source: Tensor | None
    ) -> Tensor:
        encoding = self.attention.encoding
        if encoding.embedding is not None and encoding.embedding.every_layer:
            x = encoding.embed(x, layout) if cache is None else cache.embed(encoding, x, layout)
            source = None if source is None else encoding.embed(source, layout)
        attended: Tensor = self.attention(
            x,
            layout,
            context=source,
            context_layout=None if source is None else layout,
            cache=cache,
        )
        return attended
