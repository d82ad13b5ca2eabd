"""The block that every model stacks: attention and a feed-forward layer, each with a residual."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.attention import Attention, Context, LayerCache
from posenc.errors import ArgumentError, UnknownNameError
from posenc.layout import Layout
from posenc.layout.padding import zero_invalid
from posenc.models.complex_layers import ComplexAttention, ComplexFeedForward
from posenc.models.norm import Norm, make_norm, normalize

__all__ = ["Activation", "Block", "FeedForward", "SourceContext"]

Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: tuple[Activation, ...] = ("swiglu", "geglu", "gelu", "gelu_tanh", "relu")


class FeedForward(nn.Module):
    """``W_o · a(W_i x)``; with gates ``W_o · (a(W_g x) · W_i x)`` (Shazeer 2020).

    Args:
        dim: width C.
        hidden: width in between.
        activation: with gates ``"swiglu"`` (a is SiLU) or ``"geglu"`` (a is GELU by tanh);
            without, ``"gelu"``, ``"gelu_tanh"`` (its approximation by tanh) or ``"relu"``.
        bias: the projections have biases.

    Raises:
        UnknownNameError: for another activation.
    """

    def __init__(
        self, *, dim: int, hidden: int, activation: Activation = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UnknownNameError.of("activation", activation, ACTIVATIONS)
        self.activation = activation
        gates = 2 if activation in ("swiglu", "geglu") else 1
        self.input = nn.Linear(dim, gates * hidden, bias=bias)
        self.output = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "B L C"]) -> Float[Tensor, "B L C"]:
        x = self.input(x)
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            x = nn.functional.silu(gate) * value
        elif self.activation == "geglu":
            gate, value = x.chunk(2, dim=-1)
            x = nn.functional.gelu(gate, approximate="tanh") * value
        elif self.activation == "gelu":
            x = nn.functional.gelu(x)
        elif self.activation == "gelu_tanh":
            x = nn.functional.gelu(x, approximate="tanh")
        else:
            x = torch.relu(x)
        projected: Tensor = self.output(x)
        return projected


class SourceContext:
    """What one block's cross-attention looks at, projected within the block's own ``forward``.

    So the projections run where sharding and offloading have gathered the block's parameters.
    Without gradients the projection is kept, however many tokens are decoded.

    Args:
        vectors: ``[B, K, C]``, of another sequence.
        layout: where they are.
    """

    def __init__(self, vectors: Float[Tensor, "B K C"], layout: Layout) -> None:
        self.vectors, self.layout = vectors, layout
        self._kept: Context | None = None

    def project(self, attention: Attention) -> Context:
        """Keys and values by ``attention``, the same layer at every call."""
        if torch.is_grad_enabled():
            return attention.project(self.vectors, self.layout)
        if self._kept is None:
            self._kept = attention.project(self.vectors, self.layout)
        return self._kept

    def select(self, rows: Int[Tensor, " rows"]) -> SourceContext:
        """The context of these batch rows; a row may come more than once (beam search)."""
        selected = SourceContext(self.vectors[rows], self.layout.select(rows))
        selected._kept = None if self._kept is None else self._kept.select(rows)
        return selected


class Block(nn.Module):
    """Attention, cross-attention if there is one, feed-forward; each with a residual and a norm.

    Args:
        dim: width C.
        attention: the attention layer. Its encoding's embedding part enters here if it is one
            that enters every block: added to what queries, keys and values are made from. It and
            the feed-forward layer may be complex ones, with ``norm="complex"``.
        cross: a second attention layer, to a context.
        feed_forward: the last layer.
        norm: ``"rms"``, ``"layer"``, ``"batch"`` or ``"complex"``.
        norm_first: norms before each layer (pre-norm) rather than after each residual.
        parallel: attention and feed-forward both read the block's input, each through its own
            norm, and both are added to it (GPT-NeoX); pre-norm, without cross-attention.
        norm_eps: see ``make_norm``.
        dropout: probability of dropping a feature of a layer's output.

    Raises:
        ArgumentError: when the cross-attention's encoding has an embedding part, or ``parallel``
            comes with post-norm or cross-attention.
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
                expected="an encoding that acts in attention",
                got=f"{type(cross.encoding.embedding).__name__}, which changes token vectors",
                remedy="Give it to the encoder or the decoder, whose tokens they are.",
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
        x: Float[Tensor, "B L C"],
        layout: Layout,
        *,
        cache: LayerCache | None = None,
        source: Float[Tensor, "B L C"] | None = None,
        context: Context | SourceContext | None = None,
    ) -> Float[Tensor, "B L C"]:
        """``x`` after all layers.

        Args:
            x: ``[B, L, C]`` token vectors; with a cache, those that follow the cached ones.
            layout: where they are. Tokens that it marks invalid may hold anything, NaN included;
                here they count as zeros.
            cache: the past of the self-attention.
            source: what keys and values of the self-attention are made of, at the same places,
                instead of ``x`` (DeBERTa's decoding layers).
            context: what the cross-attention projected of another sequence, or is to project.

        Raises:
            ArgumentError: on a context without a cross-attention, or the reverse.
        """
        if (context is None) != (self.cross is None):
            raise ArgumentError(
                "context",
                expected="one exactly where the block has a cross-attention",
                got="none" if context is None else "one",
                remedy="Pass SourceContext(vectors, layout), or leave it out.",
            )
        if self.cross is not None and isinstance(context, SourceContext):
            context = context.project(self.cross)
        x = zero_invalid(x, layout)
        source = None if source is None else zero_invalid(source, layout)
        if self.norm_first:
            if source is not None:
                source = normalize(self.attention_norm, source, layout)
            block_input = x
            normal = normalize(self.attention_norm, x, layout)
            x = x + self.dropout(self._attend(normal, layout, cache, source))
            if self.cross is not None and self.cross_norm is not None:
                normal = normalize(self.cross_norm, x, layout)
                x = x + self.dropout(self.cross(normal, layout, context=context))
            normal = normalize(self.feed_forward_norm, block_input if self.parallel else x, layout)
            fed: Tensor = self.dropout(self.feed_forward(normal))
            return x + fed
        attended = self._attend(x, layout, cache, source)
        x = normalize(self.attention_norm, x + self.dropout(attended), layout)
        if self.cross is not None and self.cross_norm is not None:
            seen = self.cross(x, layout, context=context)
            x = normalize(self.cross_norm, x + self.dropout(seen), layout)
        fed = self.dropout(self.feed_forward(x))
        return normalize(self.feed_forward_norm, x + fed, layout)

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
