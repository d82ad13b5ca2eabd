"""DeBERTa's disentangled attention."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import InitVar
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Buckets, Count, Length, Width
from posenc.encoding import BucketedTerms, Entry, ScoreTerm, TokenTableProduct
from posenc.encoding.parts import Projection
from posenc.encoding.prepared import constant, reused_later
from posenc.encoding.tensors import (
    BucketIndex,
    Keys,
    Offsets,
    Queries,
    Scores,
    StructuredTerms,
    repeat_heads,
)
from posenc.encodings.common.buckets import gather_rows
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.runtime import has_values

Projections = Literal["own", "content"]
Lookup = Literal["paper", "released"]
Clamp = Literal["before", "after"]

STD = 0.02
"""Standard deviation of all initial values, as in BERT."""


class RelativeEmbeddings(nn.Module):
    """The vectors P ``[2S, C]`` that all layers of a DeBERTa share, and the row of each offset.

    Args:
        dim, max_distance, buckets, clamp, normalize: as in ``Deberta``.

    Raises:
        ArgumentError: as ``Deberta``.
    """

    def __init__(
        self,
        dim: int,
        *,
        max_distance: int = 512,
        buckets: int | None = None,
        clamp: Clamp = "before",
        normalize: bool = False,
    ) -> None:
        super().__init__()
        if buckets is not None and (buckets < 4 or buckets % 2):
            raise ArgumentError(
                "buckets", expected="an even number from 4, or None", got=buckets, remedy="Use 256."
            )
        if buckets is not None and max_distance < buckets // 2 + 2:
            raise ArgumentError(
                "max_distance",
                expected=f"{buckets // 2 + 2} or more, past the distances with their own bucket",
                got=max_distance,
                remedy="Raise it or use fewer buckets.",
            )
        self.span = max_distance if buckets is None else buckets
        self.boundaries = None if buckets is None else log_boundaries(buckets, max_distance, clamp)
        self.rows = nn.Parameter(torch.empty(2 * self.span, dim))
        self.norm = nn.LayerNorm(dim, eps=1e-7) if normalize else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.rows, std=STD)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, index: Int[Tensor, "N"] | None = None) -> Float[Tensor, "N C"]:
        """P, or its rows at ``index``, normalised with ``normalize``."""
        rows = self.rows if index is None else self.rows.index_select(0, index)
        if self.norm is None:
            return rows
        normal: Tensor = self.norm(rows)
        return normal

    def reached(self, grid: Grid) -> tuple[int, int]:
        """The smallest and largest bucket of a grid's offsets, known without reading a device.

        All buckets while compiling, so that one graph serves all lengths, and of fake tensors.
        """
        everything = 0, 2 * self.span
        readable = all(has_values(side.positions) for side in (grid.query, grid.key))
        if not readable or not self.rows.numel():
            return everything
        if grid.shift is not None:
            first, last = grid.shift - (grid.query.length - 1), grid.shift + grid.key.length - 1
        elif grid.query.device.type == "cpu" and grid.query.length and grid.key.length:
            query, key = (side.positions.detach() for side in (grid.query, grid.key))
            first = int((key.min() - query.max()).floor())
            last = int((key.max() - query.min()).ceil())
        else:
            return everything
        ends = torch.tensor([[last], [first]], dtype=torch.float64, device="cpu")
        low, high = self.bucket(ends).tolist()
        return low, high

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Signed bucket of i - j = -Δ, counted from 0: 0 … 2S, one more than there are rows."""
        back = -offset[..., 0].round()
        if self.boundaries is None:
            return back.clamp(-self.span, self.span).long() + self.span
        boundaries = constant(self.boundaries, like=back)
        step = torch.bucketize(back.abs(), boundaries, right=True)
        return torch.where(back < 0, -step, step) + self.span

    def delta(self, offset: Offsets) -> BucketIndex:
        """``δ(i, j)``, the row of each offset Δ = j - i ``[..., 1]``: 0 … 2S - 1."""
        return self.bucket(offset).clamp(max=2 * self.span - 1)


def log_boundaries(buckets: int, max_distance: int, clamp: Clamp) -> tuple[int, ...]:
    """The smallest distance in each bucket but the first; with m = buckets/2,
    bucket ``m + t`` (t ≥ 1) begins at the least a with ``a > m · ((max_distance - 1)/m)^e``,
    e = (t - 1)/(m - 1), decided in integers. The last of them, ``max_distance``, begins what
    clamping "before" never reaches.
    """
    middle = buckets // 2
    boundaries = list(range(1, middle + 1))
    distance = middle
    for step in range(middle - 1):
        most = (max_distance - 1) ** step * middle ** (middle - 1 - step)
        candidates = range(distance, max_distance + 1)
        distance += bisect_right(candidates, most, key=lambda n: n ** (middle - 1))
        boundaries.append(distance)
    return (*boundaries,) if clamp == "before" else (*boundaries, max_distance)


class Deberta(ScoreTerm):
    """DeBERTa: content attends to relative positions, and relative positions to content.

    ``s_ij = scale · (q_i · k_j + q_i · W_K P[δ(i, j)] + k_j · W_Q P[δ(j, i)])``,
    ``δ(i, j) = clip(i - j + S, 0, 2S - 1)``, scale = (3D)^-1/2.

    i - j in tokens (a fractional one is rounded); P ``[2S, C]``, one for all layers. Version 1
    (the default) has S = ``max_distance`` and projections W_K, W_Q of each layer's own. Version 2
    is ``buckets=256, projections="content", normalize=True``: P is layer-normalised and projected
    as the layer's content is, S = ``buckets``, and i - j is first put in a signed bucket, which
    holds one distance up to m = S/2 and beyond it distance a in bucket
    ``m + ⌈ln(a/m) / ln((max_distance - 1)/m) · (m - 1)⌉``; found in integers here.

    Differs from the paper in nothing with the default options. The released code, Microsoft's and
    transformers' alike, reads row δ(i, j) in the third term too, where the paper has δ(j, i): for
    released weights take ``lookup="released"``. The two differ in ``clamp``.

    Args:
        dim: width C.
        heads: H.
        head_dim: width D of a head.
        max_distance: offsets from here on share a row.
        buckets: log buckets a direction (version 2), even; None for one distance a row.
        projections: ``"own"`` of each layer, or ``"content"``: those of the attention layer.
        lookup: the row of the position-to-content term: ``"paper"`` or ``"released"``, see above.
        clamp: whether distances are limited to ``max_distance - 1`` ``"before"`` they are put in
            log buckets (Microsoft) or rows are limited ``"after"`` it (transformers). From
            ``i - j = -max_distance`` on down the row is then 1 or 0.
        normalize: P passes a LayerNorm (version 2).

    Raises:
        ArgumentError: when a size or count is out of its domain.
        UnknownNameError: for another ``projections``, ``lookup`` or ``clamp``.

    Reference: He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention",
    https://arxiv.org/abs/2006.03654.

    >>> import posenc, torch
    >>> first, second = posenc.create_layers("deberta", layers=2, dim=64, heads=4)
    >>> first.score.relative is second.score.relative
    True
    >>> delta = first.score.relative.delta
    >>> delta(torch.tensor([[600.0], [1.0], [0.0], [-1.0], [-600.0]])).tolist()
    [0, 511, 512, 513, 1023]
    """

    terms = 3
    rows_by_position = True

    dim: InitVar[Width]
    heads: Count
    head_dim: Width
    max_distance: Length = 512
    buckets: Buckets | None = None
    projections: Projections = "own"
    lookup: Lookup = "paper"
    clamp: Clamp = "before"
    normalize: bool = False

    def __post_init__(self, dim: int) -> None:
        self.relative = RelativeEmbeddings(
            dim,
            max_distance=self.max_distance,
            buckets=self.buckets,
            clamp=self.clamp,
            normalize=self.normalize,
        )
        sizes = dim, self.heads * self.head_dim
        own = self.projections == "own"
        self.query = nn.Linear(*sizes) if own else None
        # A key bias adds the same to all keys of a query, which softmax ignores.
        self.key = nn.Linear(*sizes, bias=False) if own else None
        self.attached: tuple[Projection, Projection] | None = None

    def reset_parameters(self) -> None:
        """Draw the initial values of this layer's own projections."""
        for layer in (self.query, self.key):
            if layer is not None:
                nn.init.normal_(layer.weight, std=STD)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def attach(self, query: Projection, key: Projection) -> None:
        """Keep the layer's projections if ``projections="content"``.

        Raises:
            ArgumentError: when they are of other widths, or the part is in another layer already.
        """
        if self.projections == "own":
            return
        if self.attached is not None and self.attached[0] != query:
            raise ArgumentError(
                "encoding",
                expected="one that is in no other layer, whose projections it uses",
                got="one that is",
                remedy="Create one for each layer: posenc.create_layers.",
            )
        wanted = (self.relative.rows.shape[1], self.heads * self.head_dim)
        if (query.in_features, query.out_features) != wanted:
            raise ArgumentError(
                "query",
                expected=f"a projection from {wanted[0]} to {wanted[1]}",
                got=f"one from {query.in_features} to {query.out_features}",
                remedy="Create the encoding with the layer's dim, heads and head_dim.",
            )
        self.attached = (query, key)  # in a tuple, so that no state dict holds them twice

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        low, high = self.relative.reached(grid)
        from_query, from_key = self._tables(torch.arange(low, high + 1, device=q.device))
        bucket = self.relative.bucket(grid.offset) - low
        c2p = gather_rows(q, from_query, bucket)
        p2c = gather_rows(k, from_key, bucket.mT).mT
        return scale * (c2p + p2c)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        low, high = self.relative.reached(grid)

        def bucket(offset: Offsets) -> BucketIndex:
            return high - self.relative.bucket(offset).clamp(low, high)

        def tables(low: int, high: int) -> list[Tensor]:
            falling = torch.arange(high, low - 1, -1, device=q.device)  # as offsets rise
            return [(scale * table).contiguous() for table in self._tables(falling)]

        last, layers = 2 * self.relative.span, (*self._projections(), self.relative)
        kind = (scale, self.lookup, self.heads, self.head_dim)
        stored = reused_later(lambda: tables(0, last), "tables", *kind, layers=layers)
        if stored is None:
            from_query, from_key = tables(low, high)
        else:
            from_query, from_key = (table[:, last - high : last - low + 1] for table in stored)
        left = TokenTableProduct(q, from_query)
        right = TokenTableProduct(repeat_heads(k, q.shape[1]), from_key)
        return (BucketedTerms(bucket, left=left, right=right, max_distance=self.max_distance),)

    def _tables(
        self, buckets: Int[Tensor, "N"]
    ) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N D"]]:
        """Rows of the buckets for products with queries, and with keys."""
        query, key = self._projections()
        from_query = self._rows(key, buckets)
        if len(from_query) != self.heads:
            from_query = from_query.repeat_interleave(self.heads // len(from_query), dim=0)
        mirrored = buckets if self.lookup == "released" else 2 * self.relative.span - buckets
        return from_query, self._rows(query, mirrored)

    def _rows(self, layer: Projection, buckets: Int[Tensor, "N"]) -> Float[Tensor, "h N D"]:
        """Projected rows of the buckets; of the 2S + 1 buckets the last two share a row."""
        read = self.relative(buckets.clamp(max=2 * self.relative.span - 1))
        return layer(read).view(len(read), -1, self.head_dim).transpose(0, 1)

    def _projections(self) -> tuple[Projection, Projection]:
        """W_Q and W_K."""
        query: Projection | None = self.query
        key: Projection | None = self.key
        if query is None or key is None:
            if self.attached is None:
                raise ArgumentError(
                    "projections",
                    expected="'own', outside an attention layer",
                    got="'content', whose projections are the layer's",
                    remedy="Put the encoding into posenc.Attention, or call attach(query, key).",
                )
            query, key = self.attached
        return query, key


def _share(layers: Sequence[Deberta]) -> None:
    for layer in layers[1:]:
        layer.relative = layers[0].relative


ENTRY = Entry(
    factory=Deberta,
    summary="Adds products of content with relative positions, both ways.",
    relative=True,
    trainable=True,
    extrapolates="Degrades slowly: offsets from max_distance on share a row.",
    cost="Q·K·H beside (Q + K)·S·D·H",
    sharing=_share,
)
