"""TUPE: untied absolute positions beside relative ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.arguments import Buckets, Count, Length, Width, checked
from posenc.encoding import BucketedTerms, LowRank, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.encodings.common.precision import (
    WideLayerNorm,
    WideLinear,
    at_least_single,
    with_zero_gradient,
)
from posenc.encodings.common.table import read_rows, require_inside
from posenc.encodings.score.t5 import T5
from posenc.entry import Claims, Entry
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values

STD = 0.02
"""Standard deviation of all initial values, as in BERT."""

MOST_SPECIAL = 8
"""Largest number of special tokens per row that ``lower`` corrects by low-rank columns."""


class Tupe(ScoreTerm):
    """TUPE: products of positions with positions, with separate projections, and T5's bias.

    ``s_ij = scale · q_i · k_j + scale · (p_i U_Q) · (p_j U_K) + b[h, bucket(Δ)]`` (section
    3.1), scale = (2D)^-1/2; where i is a special token the last two are replaced by ``θ_1[h]``,
    and where only j is, by ``θ_2[h]`` (section 3.2).

    ``p`` ``[max_length, C]`` is read at positions in tokens (a fractional one by interpolation) and
    layer-normalised; U_Q, U_K ``[C, H·D]`` with biases; b ``[H, N]`` in T5's buckets, Δ = j - i; θ
    ``[2, H]`` in logits. Special tokens are those that the layout marks, such as [CLS]: they have
    no position. All layers share all parameters.

    Differs from the authors' code, which is bidirectional and writes θ as
    products of two further positions with themselves plus a bucket each, in having θ as parameters,
    and T5's causal buckets.

    Args:
        dim: width C.
        heads: H.
        head_dim: width D of a head.
        max_length: positions in the table.
        causal: keys ahead are masked, so all buckets are for the past.
        buckets: N; None leaves the relative part out (TUPE-A rather than TUPE-R).
        max_distance: from here on all distances share a bucket.

    Raises:
        ArgumentError: when a size or count is out of its domain.
        LengthError: in ``forward``, for a token outside the table.

    Reference: Ke et al. 2021, "Rethinking Positional Encoding in Language Pre-training",
    https://arxiv.org/abs/2006.15595.

    >>> import posenc
    >>> layers = posenc.create_layers("tupe", layers=2, dim=64, heads=4, max_length=128)
    >>> layers[0].score is layers[1].score, layers[0].default_scale(32)
    (True, 0.125)
    """

    heads: int
    head_dim: int

    terms: ClassVar[int] = 2
    by_position: ClassVar[bool] = True

    @checked
    def __init__(
        self,
        *,
        dim: Width,
        heads: Count,
        head_dim: Width,
        max_length: Length,
        causal: bool = False,
        buckets: Buckets | None = 32,
        max_distance: Length = 128,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.heads = heads
        self.causal = causal if buckets is not None else None
        self.positions = nn.Parameter(torch.empty(max_length, dim))
        self.norm = WideLayerNorm(dim)
        self.query = WideLinear(dim, heads * head_dim)
        self.key = WideLinear(dim, heads * head_dim)
        self.special = nn.Parameter(torch.empty(2, heads))
        self.relative = None
        if buckets is not None:
            self.relative = T5(
                heads=heads, causal=causal, buckets=buckets, max_distance=max_distance
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        self.norm.reset_parameters()
        for layer in (self.query, self.key):
            nn.init.normal_(layer.weight, std=STD)
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.positions, std=STD)
        nn.init.normal_(self.special, std=STD)
        if self.relative is not None:
            nn.init.normal_(self.relative.table, std=STD)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        queries = self._project(grid.query, self.query)
        score = scale * queries @ self._project(grid.key, self.key).mT
        score = score + self._bias(self._relative(q, k, grid), grid.offset)
        score = with_zero_gradient(score, self.special)
        from_special, to_special = self.special.to(score).view(2, 1, self.heads, 1, 1)
        if grid.key.special is not None:
            score = torch.where(grid.key.special[:, None, None, :], to_special, score)
        if grid.query.special is not None:
            score = torch.where(grid.query.special[:, None, :, None], from_special, score)
        return score

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        queries = scale * self._project(grid.query, self.query)
        keys = self._project(grid.key, self.key)
        group = self._relative(q, k, grid)
        table: StructuredTerms = () if group is None else (group,)
        if grid.query.special is None and grid.key.special is None:
            return (LowRank(with_zero_gradient(queries, self.special), keys), *table)
        counts = [_count_special(layout) for layout in (grid.query, grid.key)]
        if None in counts:
            return None
        queries = _without(queries, grid.query.special)
        keys = _without(keys, grid.key.special)
        corrections = (
            self._correct_columns(group, grid, counts[1] or 0),
            self._correct_rows(group, grid, counts[0] or 0),
        )
        return (LowRank(queries, keys), *table, *corrections)

    def _relative(self, q: Tensor, k: Tensor, grid: Grid) -> BucketedTerms | None:
        """The relative part in structured form."""
        return None if self.relative is None else self.relative.lower(q, k, grid, scale=1.0)[0]

    def _correct_columns(self, group: BucketedTerms | None, grid: Grid, count: int) -> LowRank:
        """For each special key a column: θ_2 less the table's value; 0 for special queries."""
        to, marks = _special_tokens(grid.key, count)
        value = self.special[1].view(-1, 1, 1) - self._bias(
            group, to.unsqueeze(1) - grid.query.positions.unsqueeze(2)
        )
        marks = marks.to(value).expand(-1, self.heads, -1, -1)
        return LowRank(_without(value, grid.query.special), marks)

    def _correct_rows(self, group: BucketedTerms | None, grid: Grid, count: int) -> LowRank:
        """For each special query a row: θ_1 less the table's value."""
        at, marks = _special_tokens(grid.query, count)
        value = self.special[0].view(-1, 1, 1) - self._bias(
            group, grid.key.positions.unsqueeze(2) - at.unsqueeze(1)
        )
        return LowRank(marks.to(value).expand(-1, self.heads, -1, -1), value)

    def _bias(self, group: BucketedTerms | None, offset: Float[Tensor, "b Q K 1"]) -> Scores:
        """``b[h, bucket(Δ)]``, or 0."""
        if group is None or group.table is None:
            return self.special.new_zeros(1, self.heads, *offset.shape[1:3])
        return group.table[:, group.bucket(offset)].transpose(0, 1)

    def _project(self, layout: Layout, layer: nn.Linear) -> Float[Tensor, "b H L D"]:
        """Normalised position vectors through U_Q or U_K, in float32 or better."""
        require_inside(
            layout,
            self.positions.shape[0],
            holder="TUPE's table",
            remedy="Create it with a larger max_length.",
        )
        rows = self.norm(at_least_single(read_rows(self.positions, layout)))
        projected: Tensor = layer(rows)
        return projected.view(*projected.shape[:2], self.heads, -1).transpose(1, 2)


def _without(x: Float[Tensor, "b H L D"], special: Bool[Tensor, "b L"] | None) -> Tensor:
    return x if special is None else x.masked_fill(special[:, None, :, None], 0.0)


def _count_special(layout: Layout) -> int | None:
    """Largest number of special tokens in a row; None if too many or unknown."""
    if layout.special is None:
        return 0
    if not has_values(layout.special):
        return None
    most = int(layout.special.sum(-1).max())
    return most if most <= MOST_SPECIAL else None


def _special_tokens(
    layout: Layout, count: int
) -> tuple[Float[Tensor, "b S 1"], Bool[Tensor, "b 1 L S"]]:
    """Positions of each row's special tokens, ``count`` a row, and whether token l is the s-th.

    Rows with fewer are filled with non-matching entries.
    """
    special = layout.special
    if special is None:
        special = torch.zeros_like(layout.order, dtype=torch.bool)
    rows = max(special.shape[0], layout.positions.shape[0])
    special = special.expand(rows, -1)
    place = special.long().argsort(dim=-1, descending=True, stable=True)[:, :count]
    positions = layout.positions.expand(rows, -1, -1).gather(1, place.unsqueeze(-1))
    tokens = torch.arange(layout.length, device=place.device).view(1, -1, 1)
    here = (tokens == place.unsqueeze(1)) & special.gather(1, place).unsqueeze(1)
    return positions, here.unsqueeze(1)


ENTRY = Entry(
    factory=Tupe,
    summary="Adds products of separately projected positions, and T5's bias.",
    claims=Claims(
        relative=False,
        trainable=True,
        extrapolates="Not at all: positions past the table raise.",
        cost="Q·K·D·H, as extra columns on queries and keys",
        exceptions={"positions": "only 0 … max_length - 1 exist"},
    ),
    sharing="layers",
)
