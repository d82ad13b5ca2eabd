"""The attention layer around ``attend``: projections, heads and the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Length, Probability, Rate, Width, check, head_width
from posenc.attention.api import attend
from posenc.attention.backends.common.base import Backend
from posenc.attention.cache import LayerCache
from posenc.attention.call import Call, require_fit
from posenc.attention.decoding import attend_last, may_keep_transformed, transform_tokens
from posenc.attention.dispatch import named
from posenc.encoding import Encoding
from posenc.encoding.prepared import Prepared, entering
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.features import require_features
from posenc.layout.padding import zero_invalid


@dataclass(frozen=True, eq=False)
class Context:
    """Keys and values of cross-attention, projected once for all later queries.

    Args:
        keys: ``[B, G, K, D]``, untransformed.
        values: ``[B, G, K, D]``.
        layout: their positions, with the signals that the encoding has observed.
    """

    keys: Float[Tensor, "B G K D"]
    values: Float[Tensor, "B G K D"]
    layout: Layout

    def select(self, rows: Int[Tensor, " rows"]) -> Context:
        """The context of these batch rows; a row may come more than once (beam search)."""
        return Context(self.keys[rows], self.values[rows], self.layout.select(rows))


class Attention(nn.Module):
    """Multi-head attention with any positional encoding, self or cross, cached or whole.

    In posenc's models adapters find its projections by ``attention.query``, ``attention.key`` and
    ``attention.value``; ``value`` alone is also the name of a part of some encodings.

    Args:
        dim: width C of the model.
        heads: query heads H.
        kv_heads: key/value heads G, of which H must be a multiple; by default as many as there are
            queries: H, or fewer where heads share them (RoPE++).
        head_dim: width D of a head; ``dim / heads`` by default.
        encoding: its query_key, score and value parts are used here.
        causal: a token sees the past only.
        window: a token sees fewer than this many steps away only.
        bias: the projections have biases.
        output_bias: whether the last one has; as the others by default.
        merged: one matrix makes queries, keys and values: a product instead of three in
            self-attention, and one layer ``merged`` in place of ``query``, ``key`` and ``value``.
        dropout: probability of dropping an attention weight in training.
        scale: factor of the logits; ``(terms · D) ** -0.5`` by default.
        sinks: learn a logit a head that joins the softmax's sum and has no value, at first 0.
        softcap: c of ``c · tanh(s / c)``, which logits become; None for none.
        backend: see ``attend``.

    Attributes:
        attend: computes attention in every call; ``posenc.attend``, or what takes its place, such
            as ``posenc.distributed.ContextParallel``.
        prepared: results that its calls share, perhaps with those of a model's other layers.

    Raises:
        ArgumentError: when the heads do not divide, or the encoding is made for others, for another
            width or for another mask.
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
        output_bias: bool | None = None,
        merged: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        sinks: bool = False,
        softcap: float | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__()
        for name, domain, value in (
            ("dim", Width, dim),
            ("heads", Count, heads),
            ("kv_heads", Count | None, kv_heads),
            ("head_dim", Width | None, head_dim),
            ("window", Length | None, window),
            ("dropout", Probability, dropout),
            ("scale", Rate | None, scale),
            ("sinks", bool, sinks),
            ("softcap", Rate | None, softcap),
            ("encoding", Encoding, encoding),
            ("causal", bool, causal),
            ("bias", bool, bias),
            ("output_bias", bool | None, output_bias),
            ("merged", bool, merged),
        ):
            check(name, domain, value)
        if not (isinstance(backend, str) and backend == "auto"):
            named(backend)
        queries = encoding.queries(heads)
        kv_heads = queries if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ArgumentError(
                "heads",
                expected="a multiple of kv_heads",
                got=f"{heads} and {kv_heads}",
                remedy="Choose kv_heads among the divisors of heads.",
            )
        head_dim = head_width(dim, heads) if head_dim is None else head_dim
        require_fit(encoding, heads=heads, head_dim=head_dim, dim=dim, causal=causal)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.queries = queries
        self.causal, self.window = causal, window
        self.dropout, self.scale, self.softcap = dropout, scale, softcap
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.backend: str | Backend = backend
        self.attend: Callable[..., Tensor] = attend
        self.widths = (queries * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.merged = nn.Linear(dim, sum(self.widths), bias=bias) if merged else None
        self.query, self.key, self.value = (
            None if merged else nn.Linear(dim, width, bias=bias) for width in self.widths
        )
        output_bias = bias if output_bias is None else output_bias
        self.output = nn.Linear(heads * head_dim, dim, bias=output_bias)
        self.encoding = encoding
        self.prepared = Prepared()
        self.lend_projections()

    def refer_to(self, encoding: Encoding) -> None:
        """Use an encoding that belongs to another module, such as the model of several layers.

        It is then none of this layer's submodules. Assign to ``encoding`` for one that is.
        """
        self._modules.pop("encoding", None)
        object.__setattr__(self, "encoding", encoding)
        self.lend_projections()

    def lend_projections(self) -> None:
        """Give the encoding's parts this layer's projections of queries and of keys.

        Raises:
            ArgumentError: from a part that they do not fit.
        """
        for part in self.encoding.parts():
            part.attach(LayerProjection(self, "query"), LayerProjection(self, "key"))

    def forward(
        self,
        x: Float[Tensor, "B Q C"],
        layout: Layout,
        *,
        context: Float[Tensor, "B K C"] | Context | None = None,
        context_layout: Layout | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B Q C"]:
        """Attend from ``x`` to itself (and what is cached), or to ``context``.

        Args:
            x: ``[B, Q, C]`` token vectors.
            layout: where they are; with a cache, where the new tokens are. Tokens that it marks
                invalid may hold anything, NaN included, here and in ``context`` and the cache.
            context: ``[B, K, C]``, what to look at instead, with its ``context_layout``; or what
                ``project`` made of both.
            cache: the past; it is extended by these tokens.

        Raises:
            ArgumentError: when a tensor ``context`` and ``context_layout`` do not come together, or
                tensors do not fit their layouts or this layer.
        """
        for name, kind, value in (
            ("context", (Tensor, Context), context),
            ("context_layout", (Layout,), context_layout),
            ("cache", (LayerCache,), cache),
        ):
            if value is not None and not isinstance(value, kind):
                raise ArgumentError(
                    name,
                    expected=" or ".join(each.__name__ for each in kind),
                    got=type(value).__name__,
                    remedy="Leave it out, or see Attention.forward.",
                )
        require_features(x, layout, self.dim)
        if isinstance(context, Tensor) != (context_layout is not None):
            raise ArgumentError(
                "context",
                expected="a tensor and context_layout together",
                got="one of them",
                remedy="Say where the context's tokens are; a projected Context knows.",
            )
        if cache is not None and self.attend is not attend:
            raise ArgumentError(
                "cache",
                expected="None with another attend than posenc's own",
                got="a cache",
                remedy="Decode with a model that is on one rank.",
            )
        layout, is_self = layout.in_precision_of(x), context is None
        x = zero_invalid(x, layout)
        if context is None and self.merged is not None:
            layout = self.encoding.observe(x, layout)
            parts = self.merged(x).split(self.widths, dim=-1)
            k, v = (self._split(part, self.kv_heads) for part in parts[1:])
            q, key_layout = self._split(parts[0], self.queries), layout
        else:
            if not isinstance(context, Context):
                if context is not None and context_layout is not None:
                    require_features(
                        *(context, context_layout, self.dim), name="context", where="context_layout"
                    )
                context = self._project(x if context is None else context, context_layout or layout)
            layout = context.layout if is_self else self.encoding.observe(x, layout)
            q = self._split(self._projected(x, "query"), self.queries)
            k, v, key_layout = context.keys, context.values, context.layout
        if self.queries != self.heads:
            q = q.repeat_interleave(self.heads // self.queries, dim=1)
        with entering(self.prepared):
            output = self._attended(q, k, v, layout, key_layout, cache, is_self=is_self)
        merged: Tensor = self.output(output.transpose(1, 2).flatten(2))
        return merged

    def _attended(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K D"],
        layout: Layout,
        key_layout: Layout,
        cache: LayerCache | None,
        *,
        is_self: bool,
    ) -> Float[Tensor, "B H Q D"]:
        """Attention to these keys and those in the cache, which is extended by them."""
        encoding, scale = self.encoding, self.scale
        transform = None if cache is None else encoding.value_transform()
        if transform is not None and next(transform[0].parameters(), None) is not None:
            transform = None  # it may change between calls; attend applies it to all values
        if transform is not None:
            v, encoding = transform[0](v, key_layout), transform[1]
        if cache is not None:
            if is_self and may_keep_transformed(self.encoding, cache, causal=self.causal):
                grid = Grid(layout, key_layout, self.causal, self.window)
                rotated, keys = transform_tokens(Call(q, k, v, grid, self.encoding))
                if keys.shape == k.shape:
                    scale = encoding.default_scale(self.head_dim) if scale is None else scale
                    q, k, cache.transformed = rotated, keys, True
                    encoding = cache.without_transform(encoding)
            k, v, key_layout = cache.append(k, v, key_layout)
        grid = Grid(layout, key_layout, self.causal, self.window)
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"sinks": self.sinks, "softcap": self.softcap}
        softmax = {name: value for name, value in options.items() if value is not None}
        output = None
        whole = encoding.value_transform() is None
        if cache is not None and whole and self.backend == "auto" and not dropout:
            call = Call(q, k, v, grid, encoding, scale=scale, **softmax)
            output = attend_last(call)
        if output is None:
            softmax |= {"backend": self.backend, "dropout": dropout, "scale": scale}
            output = self.attend(q, k, v, grid, encoding, **softmax)
        return output if transform is None else transform[0].undo(output, layout)

    def project(self, context: Float[Tensor, "B K C"], layout: Layout) -> Context:
        """Keys and values of ``context``, whose positions are in ``layout``.

        Raises:
            ArgumentError: when they do not fit each other or this layer.
        """
        require_features(context, layout, self.dim, name="context")
        return self._project(context, layout)

    def _project(self, context: Float[Tensor, "B K C"], layout: Layout) -> Context:
        context = zero_invalid(context, layout)
        if self.merged is None:
            keys, values = self._projected(context, "key"), self._projected(context, "value")
        else:
            _, keys, values = self.merged(context).split(self.widths, dim=-1)
        return Context(
            self._split(keys, self.kv_heads),
            self._split(values, self.kv_heads),
            self.encoding.observe(context, layout),
        )

    def _projected(
        self, x: Float[Tensor, "*places C"], name: Literal["query", "key", "value"]
    ) -> Float[Tensor, "*places width"]:
        """``x`` through the layer called ``name``, or through its rows of the merged one."""
        if self.merged is None:
            projected: Tensor = getattr(self, name)(x)
            return projected
        place = ("query", "key", "value").index(name)
        part: Tensor = self.merged(x).split(self.widths, dim=-1)[place]
        return part

    def _split(self, x: Float[Tensor, "B L HD"], heads: int) -> Float[Tensor, "B H L D"]:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)


@dataclass(frozen=True)
class LayerProjection:
    """The queries or keys of an attention layer, by the modules that it has when this is called.

    Modules may be replaced after the layer was made (adapters, quantisation).

    Args:
        layer: the attention layer.
        name: which of its projections.
    """

    layer: Attention
    name: Literal["query", "key"]

    @property
    def in_features(self) -> int:
        """Width C of the layer's input."""
        return self.layer.dim

    @property
    def out_features(self) -> int:
        """Width of all heads together."""
        return self.layer.widths[0 if self.name == "query" else 1]

    def modules(self) -> Iterator[nn.Module]:
        """The modules that compute it."""
        merged: nn.Module | None = self.layer.merged
        projection: nn.Module = getattr(self.layer, self.name) if merged is None else merged
        return projection.modules()

    def __call__(self, x: Float[Tensor, "*places C"], /) -> Float[Tensor, "*places HD"]:
        return self.layer._projected(x, self.name)
