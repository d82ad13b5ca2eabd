"""TUPE: untied absolute positions beside relative ones."""

from __future__ import annotations

from dataclasses import InitVar, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.arguments import Buckets, Count, Length, Width
from posenc.encoding import BucketedTerms, Entry, LowRank, ScoreTerm
from posenc.encoding.prepared import reused_later
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.encodings.common.precision import (
    WideLayerNorm,
    WideLinear,
    at_least_single,
    with_zero_gradient,
)
from posenc.encodings.common.special_tokens import special_mask
from posenc.encodings.common.table import read_rows, require_inside
from posenc.encodings.score.t5 import T5
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

    Reference: Ke et al. 2020, "Rethinking Positional Encoding in Language Pre-training",
    https://arxiv.org/abs/2006.15595.

    >>> import posenc
    >>> layers = posenc.create_layers("tupe", layers=2, dim=64, heads=4, max_length=128)
    >>> layers[0].score is layers[1].score, layers[0].default_scale(32)
    (True, 0.125)
    """

    terms = 2
    by_position = True

    dim: InitVar[Width]
    heads: Count
    head_dim: Width
    max_length: Length
    causal: InitVar[bool] = False
    buckets: Buckets | None = 32
    max_distance: Length = 128

    def __post_init__(self, dim: int, causal: bool) -> None:
        self.positions = nn.Parameter(torch.empty(self.max_length, dim))
        self.norm = WideLayerNorm(dim)
        self.query, self.key = (WideLinear(dim, self.heads * self.head_dim) for _ in range(2))
        self.special = nn.Parameter(torch.empty(2, self.heads))
        self.relative, self.causal = None, None
        if self.buckets is not None:
            self.causal = causal
            self.relative = T5(
                heads=self.heads,
                causal=causal,
                buckets=self.buckets,
                max_distance=self.max_distance,
            )

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
        queries, keys = self._projected(grid, scale)
        score = queries @ keys.mT
        score = score + _bias(self.special, self._relative(q, k, grid), grid.offset)
        score = with_zero_gradient(score, self.special)
        from_special, to_special = self.special.to(score).view(2, 1, self.heads, 1, 1)
        if grid.key.special is not None:
            score = torch.where(grid.key.special[:, None, None, :], to_special, score)
        if grid.query.special is not None:
            score = torch.where(grid.query.special[:, None, :, None], from_special, score)
        return score

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        queries, keys = self._reused(grid, scale) or self._projected(grid, scale)
        special, group = self.special, self._relative(q, k, grid)
        table: StructuredTerms = () if group is None else (group,)
        if grid.query.special is None and grid.key.special is None:
            if group is None or group.table is None:
                return (LowRank(with_zero_gradient(queries, special), keys),)
            small = with_zero_gradient(group.table, special)
            return (LowRank(queries, keys), replace(group, table=small))
        counts = [_count_special(layout) for layout in (grid.query, grid.key)]
        if None in counts:
            return None
        queries = _without(queries, grid.query.special)
        keys = _without(keys, grid.key.special)
        corrections = (
            _correct_columns(special, group, grid, counts[1] or 0),
            _correct_rows(special, group, grid, counts[0] or 0),
        )
        return (LowRank(queries, keys), *table, *corrections)

    def _relative(self, q: Tensor, k: Tensor, grid: Grid) -> BucketedTerms | None:
        """The relative part in structured form."""
        return None if self.relative is None else self.relative.lower(q, k, grid, scale=1.0)[0]

    def _projected(
        self, grid: Grid, scale: float
    ) -> tuple[Float[Tensor, "b H Q D"], Float[Tensor, "b H K D"]]:
        """Positions of queries through U_Q, times ``scale``, and of keys through U_K."""
        rows = self._normalised(self._read(grid.query))
        same = grid.key is grid.query
        key_rows = rows if same else self._normalised(self._read(grid.key))
        queries, keys = scale * self.query(rows), self.key(key_rows)
        wide = torch.promote_types(queries.dtype, keys.dtype)  # positions of one may be float64
        return self._split(queries.to(wide)), self._split(keys.to(wide))

    def _reused(
        self, grid: Grid, scale: float
    ) -> tuple[Float[Tensor, "1 H Q D"], Float[Tensor, "1 H K D"]] | None:
        """``_projected``, cut from the first positions', stored while weights stay the same."""
        sides = (grid.query, grid.key)
        if any(side.start is None for side in sides) or not has_values(self.positions):
            return None
        for side in sides:
            self._require_inside(side)
        parts = [slice(side.start, (side.start or 0) + side.length) for side in sides]
        count = min(len(self.positions), 1 << max(part.stop for part in parts).bit_length())

        def project() -> list[Tensor]:
            rows = self._normalised(self.positions[:count].unsqueeze(0))
            return [self._split(scale * self.query(rows)), self._split(self.key(rows))]

        layers, kind = (self.query, self.key, self.norm), (count, scale, self.head_dim)
        stored = reused_later(project, "factors", *kind, layers=layers, tensors=(self.positions,))
        if stored is None:
            return None
        query, key = (x[:, :, part] for x, part in zip(stored, parts, strict=True))
        return query, key

    def _normalised(self, table: Float[Tensor, "b L C"]) -> Float[Tensor, "b L C"]:
        """Layer-normalised position vectors, in float32 or better."""
        rows: Tensor = self.norm(at_least_single(table))
        return rows

    def _split(self, x: Float[Tensor, "b L E"]) -> Float[Tensor, "b H L D"]:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _read(self, layout: Layout) -> Float[Tensor, "b L C"]:
        """Position vectors of the tokens."""
        self._require_inside(layout)
        return read_rows(self.positions, layout)

    def _require_inside(self, layout: Layout) -> None:
        require_inside(layout, len(self.positions), "TUPE's table")


def _correct_columns(
    special: Float[Tensor, "2 h"], group: BucketedTerms | None, grid: Grid, count: int
) -> LowRank:
    """For each special key a column: θ_2 less the table's value; 0 for special queries."""
    to, marks = _special_tokens(grid.key, count)
    offset = to.unsqueeze(1) - grid.query.positions.unsqueeze(2)
    value = special[1].view(-1, 1, 1) - _bias(special, group, offset)
    marks = marks.to(value).expand(-1, special.shape[1], -1, -1)
    return LowRank(_without(value, grid.query.special), marks)


def _correct_rows(
    special: Float[Tensor, "2 h"], group: BucketedTerms | None, grid: Grid, count: int
) -> LowRank:
    """For each special query a row: θ_1 less the table's value."""
    at, marks = _special_tokens(grid.query, count)
    offset = grid.key.positions.unsqueeze(2) - at.unsqueeze(1)
    value = special[0].view(-1, 1, 1) - _bias(special, group, offset)
    return LowRank(marks.to(value).expand(-1, special.shape[1], -1, -1), value)


def _bias(
    special: Float[Tensor, "2 h"], group: BucketedTerms | None, offset: Float[Tensor, "b Q K 1"]
) -> Scores:
    """``b[h, bucket(Δ)]``, or 0."""
    if group is None or group.table is None:
        return special.new_zeros(1, special.shape[1], *offset.shape[1:3])
    return group.table[:, group.bucket(offset)].transpose(0, 1)


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
    special = special_mask(layout)
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
    relative=False,
    trainable=True,
    extrapolates="Not at all: positions past the table raise.",
    cost="Q·K·D·H, as extra columns on queries and keys",
    exceptions={"positions": "only 0 … max_length - 1 exist"},
    sharing="layers",
)
