"""Encoding: at most one part for each site where position enters a Transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posenc.encoding.heads import SomeHeadsScore, SomeHeadsTransform, SomeHeadsValue, range_of
from posenc.encoding.parts import (
    EmbeddingEncoding,
    Part,
    QueryKeyTransform,
    ScoreTerm,
    ValuePart,
    ValueTransform,
    require_causal,
)
from posenc.encoding.prepared import Prepared
from posenc.encoding.rotation import both_features
from posenc.encoding.scaling import LogitFactor, ScaledQueries, ScaledScore, has_bands, is_scaled
from posenc.encoding.tensors import Features, Scores, TokenIds
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.checks import require_whole
from posenc.layout.features import require_features, require_token_ids
from posenc.layout.padding import zero_invalid
from posenc.runtime import has_values

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""New logit of a pair, from its logit and its batch row, head, query and key indices."""


class Encoding(nn.Module):
    """A positional encoding, with at most one part per site.

    An encoding without parts is NoPE. Encodings add: ``create("rope", …) + create("alibi", …)``.

    Args:
        embedding: changes token vectors.
        query_key: transforms queries and keys.
        score: adds to the logits, or replaces them.
        value: adds to the weighted sum of values, or transforms values and outputs.

    Raises:
        ArgumentError: for a part of another site.
    """

    embedding: EmbeddingEncoding | None
    query_key: QueryKeyTransform | None
    score: ScoreTerm | None
    value: ValuePart | None

    SITES: ClassVar[dict[str, type[Part]]] = {
        "embedding": EmbeddingEncoding,
        "query_key": QueryKeyTransform,
        "score": ScoreTerm,
        "value": ValuePart,
    }

    def __init__(
        self,
        *,
        embedding: EmbeddingEncoding | None = None,
        query_key: QueryKeyTransform | None = None,
        score: ScoreTerm | None = None,
        value: ValuePart | None = None,
    ) -> None:
        super().__init__()
        parts = {"embedding": embedding, "query_key": query_key, "score": score, "value": value}
        for site, part in parts.items():
            if part is not None and not isinstance(part, self.SITES[site]):
                raise ArgumentError(
                    site,
                    expected=self.SITES[site].__name__,
                    got=type(part).__name__,
                    remedy="Use Encoding.of(part), which finds the site.",
                )
            self.register_module(site, part)
        self.prepared = Prepared()
        self.__dict__["_inner"] = None
        self.value_transform()

    @classmethod
    def of(cls, *parts: Part) -> Encoding:
        """The encoding with these parts, each on its own site.

        Parts that scale the logits (``scaled``) scale those of all.

        Raises:
            ArgumentError: if two parts share a site, or an argument is not a part.
        """
        placed: dict[str, Part] = {}
        factors: list[LogitFactor] = []
        for given in parts:
            part: Part | None = given
            while isinstance(part, ScaledQueries):
                factors.insert(0, part.factor)
                part = part.inner
            if part is None:
                continue
            site = next((s for s, kind in cls.SITES.items() if isinstance(part, kind)), None)
            if site is None:
                raise ArgumentError(
                    "part",
                    expected="an EmbeddingEncoding, QueryKeyTransform, ScoreTerm or ValuePart",
                    got=type(part).__name__,
                    remedy="Subclass one of these.",
                )
            if site in placed:
                raise ArgumentError(
                    "encoding",
                    expected=f"one {site} part",
                    got=f"{type(placed[site]).__name__} and {type(part).__name__}",
                    remedy="Join only encodings that use different sites.",
                )
            placed[site] = part
        encoding = cls(**placed)  # type: ignore[arg-type]
        for factor in factors:
            encoding = encoding.scaled(factor)
        return encoding

    def scaled(self, factor: LogitFactor) -> Encoding:
        """The encoding with logits, biases included, times a factor of each query.

        Raises:
            ArgumentError: if the score part replaces the softmax.
        """
        score = self.score
        if score is not None and score.replaces_softmax:
            raise ArgumentError(
                "encoding",
                expected="weights that are a softmax, whose logits are scaled",
                got=type(score).__name__,
                remedy="Leave the scaling out.",
            )
        product = score is None or not score.replaces_product or has_bands(score)
        return Encoding(
            embedding=self.embedding,
            query_key=ScaledQueries(inner=self.query_key, factor=factor)
            if product
            else self.query_key,
            score=score
            if score is None or is_scaled(score, factor)
            else ScaledScore(inner=score, factor=factor),
            value=self.value,
        )

    def __add__(self, other: Encoding) -> Encoding:
        if not isinstance(other, Encoding):
            raise ArgumentError(
                "encoding",
                expected="an Encoding to add",
                got=type(other).__name__,
                remedy="Use posenc.create(name, …) or Encoding.of(part).",
            )
        return Encoding.of(*self.parts(), *other.parts())

    def parts(self) -> tuple[Part, ...]:
        """The parts present, in the order embedding, query_key, score, value."""
        parts = (self.embedding, self.query_key, self.score, self.value)
        return tuple([part for part in parts if part is not None])

    def value_transform(self) -> tuple[ValueTransform, Encoding] | None:
        """The value part and the encoding inside it, if it is a transform around attention."""
        if not isinstance(self.value, ValueTransform):
            return None
        inner: Encoding | None = self.__dict__["_inner"]
        if inner is None or inner.query_key is not self.query_key or inner.score is not self.score:
            inner = self.__dict__["_inner"] = Encoding(query_key=self.query_key, score=self.score)
            inner.prepared = self.prepared
        return self.value, inner

    def queries(self, heads: int) -> int:
        """Queries that a layer with ``heads`` query heads projects per token.

        Raises:
            ArgumentError: unless ``heads`` is a multiple of the heads that share a query.
        """
        heads = require_whole("heads", heads, remedy="Use the heads of the model.")
        views = 1 if self.query_key is None else self.query_key.views
        if heads % views:
            raise ArgumentError(
                "heads",
                expected=f"a multiple of {views}, the heads that share a query",
                got=heads,
                remedy="Change heads, or use another encoding.",
            )
        return heads // views

    def heads(self, begin: int, end: int) -> Encoding:
        """The encoding of query heads ``begin`` to ``end`` (exclusive).

        Parameters are shared with this encoding; the gradients of other heads are zero.

        Raises:
            ArgumentError: if there are no such heads, the range splits heads that share a query,
                or a head's result depends on other heads (DAPE).
        """
        for name, head in (("begin", begin), ("end", end)):
            require_whole(name, head, -(2**53), remedy="Heads are counted from 0.")
        kinds = {"query_key": SomeHeadsTransform, "score": SomeHeadsScore, "value": SomeHeadsValue}
        parts: dict[str, Any] = {"embedding": self.embedding}
        for site, kind in kinds.items():
            part: Part | None = getattr(self, site)
            heads = None if part is None else range_of(part, begin, end)
            parts[site] = part if part is None or heads is None else kind(part, heads)
        return Encoding(**parts)

    @property
    def causal_only(self) -> bool:
        """True if any part requires a causal mask."""
        return any(part.causal_only for part in self.parts())

    def embed(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        """``x`` after the embedding part, if there is one.

        Features of invalid tokens are replaced by zeros first.

        Raises:
            ArgumentError: for features or tokens that do not fit the layout or the part.
        """
        part = self.embedding
        if part is not None and part.takes_complex and isinstance(x, Tensor) and x.is_complex():
            require_features(x.real, layout)
        else:
            require_features(x, layout, None if part is None else part.dim)
        if tokens is not None:
            require_token_ids(tokens, layout, rows=x.shape[0])
        if part is None:
            return x
        embedded: Tensor = part(zero_invalid(x, layout), layout, tokens=tokens)
        return embedded

    def observe(self, x: Features, layout: Layout) -> Layout:
        """The layout with the signals that the attention parts compute from ``x``.

        Features of invalid tokens are replaced by zeros first.

        Raises:
            ArgumentError: if two parts compute a signal, or ``x`` does not fit the layout.
        """
        parts = [part for part in (self.query_key, self.score, self.value) if part is not None]
        widths = [part.dim for part in parts if part.dim is not None]
        require_features(x, layout, widths[0] if widths else None)
        observed = layout = layout.in_precision_of(x)  # parts return it itself without a signal
        x = zero_invalid(x, layout)
        for part in parts:
            result = part.observe(x, observed)
            if result is not observed and observed is not layout:
                raise ArgumentError(
                    "encoding",
                    expected="at most one part with a signal",
                    got=f"a second one, {type(part).__name__}",
                    remedy="Join only one such part into an encoding.",
                )
            observed = result
        return observed

    def default_scale(self, head_dim: int) -> float:
        """Default softmax scale, ``(terms · head_dim) ** -0.5``.

        A query_key part with its own ``scale`` (cosine logits) overrides it.
        """
        if self.query_key is not None and self.query_key.scale is not None:
            return self.query_key.scale
        terms = 1 if self.score is None else self.score.terms
        return float((terms * head_dim) ** -0.5)

    def bias(self, grid: Grid, *, scale: float | None = None) -> Scores:
        """Bias that the score part adds to the scaled logits, ``[B|1, H, Q, K]`` float32 or 64.

        It does not include the mask (``grid.visible``) nor the query_key part (``cos_sin``).

        Args:
            grid: of queries and keys.
            scale: softmax scale, required for TUPE (``encoding.default_scale(head_dim)``).

        Raises:
            ArgumentError: unless there is a score part that depends on positions only and no value
                part; if a part is made for another causal mask than the grid has; or if ``scale``
                is required and missing.
        """
        if self.score is None or not self.score.by_position or self.value is not None:
            raise ArgumentError(
                "encoding",
                expected="a score part that depends on positions only, and no value part",
                got=_names(self.score, self.value),
                remedy="Use posenc.attend, which passes queries and keys to the parts.",
            )
        _require_axes(self.score, grid.query)
        require_causal(self.parts(), grid.causal)
        for parameter in self.score.parameters():
            grid = grid.in_precision_of(parameter)
        # queries and keys of NaN: the bias is NaN if it depends on them
        nan = grid.query.positions.new_tensor(torch.nan)
        q, k = (nan.expand(1, 1, side.length, 1) for side in (grid.query, grid.key))
        bias: Tensor = self.score(q, k, grid, scale=torch.nan if scale is None else scale)
        if scale is None and has_values(bias) and bool(bias.isnan().any()):
            raise ArgumentError(
                "scale",
                expected=f"the softmax scale, which {type(self.score).__name__} depends on",
                got=None,
                remedy="Use scale=encoding.default_scale(head_dim), as attend does.",
            )
        return bias

    def cos_sin(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Cosines and sines that rotate queries or keys: ``x * cos + rotate_half(x) * sin``.

        FoPE's Fourier series stand in their place.

        Each ``[B|1, L, R]`` float32 or float64, or ``[B|1, H, L, R]`` if heads differ, R the number
        of rotated features. Each value occurs twice: as ``[c, c]`` with pairing ``"half"`` (Hugging
        Face's models), as c₀, c₀, c₁, c₁, … with ``"adjacent"``.

        Raises:
            ArgumentError: unless the query_key part is a rotation by position.
        """
        part, rotation = self.query_key, None
        if part is not None:
            _require_axes(part, layout)
        if part is not None and part.pairwise:
            shape = 1, part.heads or 1, layout.length, part.head_dim or 0
            q = torch.empty(shape, device=layout.device)
            rotation = part.lower(q, q, Grid.of(layout))
        if rotation is None or rotation.query is not rotation.key:
            raise ArgumentError(
                "encoding",
                expected="a query_key part that only rotates by position",
                got=_names(part),
                remedy="Use encoding.query_key(q, k, grid), which transforms both.",
            )
        cosine, sine = (both_features(x, rotation.pairing) for x in rotation.query)
        return (cosine.squeeze(1), sine.squeeze(1)) if cosine.shape[1] == 1 else (cosine, sine)

    def score_mod(self, grid: Grid, *, scale: float | None = None) -> ScoreMod:
        """``bias`` as a FlexAttention ``score_mod``, for use with ``grid.mask_mod()``.

        It holds the bias ``[B|1, H, Q, K]``.

        Args and Raises: as ``bias``.
        """
        bias = self.bias(grid, scale=scale).float()
        if bias.shape[0] == 1:
            row = bias[0]
            return lambda score, b, h, i, j: score + row[h, i, j]
        return lambda score, b, h, i, j: score + bias[b, h, i, j]


def _require_axes(part: Part, layout: Layout) -> None:
    if part.axes is not None and layout.axes not in part.axes:
        raise ArgumentError(
            "layout",
            expected=f"positions with {' or '.join(map(str, part.axes))} axes for "
            f"{type(part).__name__}",
            got=layout.axes,
            remedy="Use Layout.sequence or Layout.at for text, Layout.image for images.",
        )


def _names(*parts: object) -> str:
    return " and ".join(type(part).__name__ for part in parts if part is not None) or "no such part"
