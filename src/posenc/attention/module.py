"""The attention layer around ``attend``: projections, heads and the cache."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention.api import attend
from posenc.attention.cache import LayerCache
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.layout import Grid, Layout

__all__ = ["Attention"]


class Attention(nn.Module):
    """Multi-head attention with any positional encoding, self or cross, cached or whole.

    Args:
        dim: width C of the model.
        heads: query heads H.
        kv_heads: key/value heads G; H by default. H must be a multiple of it.
        head_dim: width D of a head; ``dim / heads`` by default.
        encoding: its query_key, score and value parts are used here.
        causal: a token sees the past only.
        window: a token sees fewer than this many steps away only.
        bias: the projections have biases.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the logits; ``(terms · D) ** -0.5`` by default.
        backend: see ``attend``.

    Raises:
        ArgumentError: when the heads do not divide, or the encoding needs a causal layer.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        encoding: Encoding,
        causal: bool = False,
        window: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ArgumentError(
                "heads",
                expected="a multiple of kv_heads, both 1 or more",
                got=f"{heads} and {kv_heads}",
                remedy="Choose kv_heads among the divisors of heads.",
            )
        if head_dim is None:
            if dim % heads:
                raise ArgumentError(
                    "dim",
                    expected=f"a multiple of heads ({heads})",
                    got=dim,
                    remedy="Change dim or heads, or give head_dim.",
                )
            head_dim = dim // heads
        if encoding.causal_only and not causal:
            raise ArgumentError(
                "causal",
                expected="True, without which this encoding means nothing",
                got=causal,
                remedy="Use causal=True, or another encoding.",
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.causal, self.window = causal, window
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(heads * head_dim, dim, bias=bias)
        self.encoding = encoding
        for part in encoding.parts():
            part.attach(self.query, self.key)

    def forward(
        self,
        x: Float[Tensor, "B Q C"],
        layout: Layout,
        *,
        context: Float[Tensor, "B K C"] | None = None,
        context_layout: Layout | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B Q C"]:
        """Attend from ``x`` to itself (and what is cached), or to ``context``.

        Args:
            x: ``[B, Q, C]`` token vectors.
            layout: where they are; with a cache, where the new tokens are.
            context: ``[B, K, C]``, what to look at instead, with its ``context_layout``.
            cache: the past; it is extended by these tokens.

        Raises:
            ArgumentError: when only one of ``context`` and ``context_layout`` is given.
        """
        if (context is None) != (context_layout is None):
            raise ArgumentError(
                "context",
                expected="context and context_layout together",
                got="one of them",
                remedy="Say where the context's tokens are.",
            )
        layout = self.encoding.observe(x, layout)
        q = self._split(self.query(x), self.heads)
        if context is None or context_layout is None:
            context, key_layout = x, layout
        else:
            key_layout = self.encoding.observe(context, context_layout)
        k = self._split(self.key(context), self.kv_heads)
        v = self._split(self.value(context), self.kv_heads)
        if cache is not None:
            k, v, key_layout = cache.append(k, v, key_layout)
        grid = Grid(layout, key_layout, self.causal, self.window)
        output = attend(
            q,
            k,
            v,
            grid,
            self.encoding,
            backend=self.backend,
            dropout=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        merged: Tensor = self.output(output.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: Float[Tensor, "B L HD"], heads: int) -> Float[Tensor, "B H L D"]:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)
