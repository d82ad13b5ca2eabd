"""Transformer block, its attention, feed-forward and norm layers, and token embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from posenc.arguments import check
from posenc.attention import Attention, Context, LatentAttention, LayerCache
from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.padding import zero_invalid
from posenc.models.complex_layers import ComplexAttention, ComplexFeedForward

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
        attention: Attention | LatentAttention | ComplexAttention,
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
        context = {} if source is None else {"context": source, "context_layout": layout}
        attended: Tensor = self.attention(x, layout, cache=cache, **context)
        return attended


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
