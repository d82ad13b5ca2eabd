"""Shaw's relative positions, on keys and on values."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Natural, Width, checked
from posenc.encoding import BucketedTerms, Encoding, Entry, ScoreTerm, TokenTableProduct, ValueTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import ClippedTable, gather_rows, sum_by_bucket
from posenc.grid import Grid


@checked
def shaw(*, head_dim: Width, max_distance: Natural = 16) -> Encoding:
    """Shaw et al.: a trained vector for each clipped offset, added to keys and to values.

    ``s_ij = scale · q_i · (k_j + a^K[n])``, ``o_i = Σ_j p_ij (v_j + a^V[n])``,
    ``n = clip(Δ, -k, k) + k``.

    Δ = j - i in tokens (a fractional one is rounded); ``k = max_distance``; ``a^K`` and ``a^V`` are
    ``[2k + 1, D]``, shared by the heads, each layer with its own. Differs from the paper in
    nothing; for keys alone use ``Encoding(score=shaw(...).score)``.

    Args:
        head_dim: width D of a head.
        max_distance: k; larger offsets share the last vector on their side. Values from 2 to 256
            perform equally in the paper.

    Raises:
        ArgumentError: when ``head_dim`` is below 1 or ``max_distance`` negative.

    Reference: Shaw et al. 2018, "Self-Attention with Relative Position Representations",
    https://arxiv.org/abs/1803.02155.

    >>> import posenc
    >>> [type(part).__name__ for part in posenc.create("shaw", head_dim=64).parts()]
    ['ShawKeys', 'ShawValues']
    """
    return Encoding(
        score=ShawKeys(head_dim=head_dim, max_distance=max_distance),
        value=ShawValues(head_dim=head_dim, max_distance=max_distance),
    )


class ShawKeys(ScoreTerm):
    """Score part of ``shaw``: ``s_ij += scale · q_i · a^K[n]``."""

    rows_by_position = True

    head_dim: Width
    max_distance: Natural = 16

    def __post_init__(self) -> None:
        self.table = ClippedTable(self.head_dim, self.max_distance)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return scale * gather_rows(q, self.table()[None], self.table.bucket(grid.offset))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        left = TokenTableProduct(q, scale * self.table()[None])
        return (BucketedTerms(self.table.bucket, left=left, max_distance=self.max_distance),)


class ShawValues(ValueTerm):
    """Value part of ``shaw``: ``o_i += Σ_j p_ij · a^V[n]``."""

    head_dim: Width
    max_distance: Natural = 16

    def __post_init__(self) -> None:
        self.table = ClippedTable(self.head_dim, self.max_distance)

    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        return sum_by_bucket(weights, self.table()[None], self.table.bucket(grid.offset))

    def lower(self, grid: Grid) -> BucketedTerms | None:
        rows = self.table()[None]
        return BucketedTerms(self.table.bucket, value=rows, max_distance=self.max_distance)


ENTRY = Entry(
    factory=shaw,
    summary="Adds a trained vector for each clipped offset to keys and to values.",
    sites=("score", "value"),
    relative=True,
    trainable=True,
    extrapolates="Degrades slowly: offsets beyond the clip distance share a vector.",
    cost="Q·K·H beside Q·(2k + 1)·D·H",
)
