"""Relative vectors on queries, keys and values."""

from __future__ import annotations

from torch import Tensor

from posenc.arguments import Natural, Width, checked
from posenc.encoding import BucketedTerms, Encoding, Entry, ScoreTerm, TokenTableProduct
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms, repeat_heads
from posenc.encodings.common.buckets import ClippedTable, gather_rows
from posenc.encodings.score.shaw import ShawValues
from posenc.grid import Grid


@checked
def contextual(*, head_dim: Width, max_distance: Natural = 16) -> Encoding:
    """A trained vector for each clipped offset, added to queries, to keys and to values.

    ``s_ij = scale · (q_i + p^Q[n]) · (k_j + p^K[n])``, ``o_i = Σ_j p_ij (v_j + p^V[n])``,
    ``n = clip(Δ, -k, k) + k``.

    Δ = j - i in tokens (a fractional one is rounded); ``k = max_distance``; the tables are
    ``[2k + 1, D]``, shared by the heads, each layer with its own. Multiplied out the logit has four
    terms: content with content, content with position, position with content, and
    ``p^Q[n] · p^K[n]``, a bias of the offset alone, which some later forms leave out. With
    ``p^Q = 0`` this is Shaw's method. Differs from the paper, which writes it as the general form
    of relative methods, in fixing its choices as Shaw does: clipped offsets, and tables that start
    Xavier-uniform.

    Args:
        head_dim: width D of a head.
        max_distance: k; larger offsets share the last vector on their side.

    Raises:
        ArgumentError: when ``head_dim`` is below 1 or ``max_distance`` negative.

    Reference: Wu et al. 2021, "Rethinking and Improving Relative Position Encoding for Vision
    Transformer", https://arxiv.org/abs/2107.14222; Shaw et al. 2018.

    >>> import posenc
    >>> [type(part).__name__ for part in posenc.create("contextual", head_dim=64).parts()]
    ['ContextualScores', 'ShawValues']
    """
    return Encoding(
        score=ContextualScores(head_dim=head_dim, max_distance=max_distance),
        value=ShawValues(head_dim=head_dim, max_distance=max_distance),
    )


class ContextualScores(ScoreTerm):
    """Score part of ``contextual``: the logit without ``scale · q_i · k_j``."""

    rows_by_position = True

    head_dim: Width
    max_distance: Natural = 16

    def __post_init__(self) -> None:
        self.query = ClippedTable(self.head_dim, self.max_distance)
        self.key = ClippedTable(self.head_dim, self.max_distance)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        bucket, queries, keys = self.key.bucket(grid.offset), self.query(), self.key()
        position_to_position = (queries * keys).sum(-1)[bucket].unsqueeze(1)
        content_to_position = gather_rows(q, keys[None], bucket)
        position_to_content = gather_rows(k, queries[None], bucket.mT).mT
        total: Tensor = position_to_position + content_to_position + position_to_content
        return scale * total

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        queries, keys = self.query(), self.key()
        table = scale * (queries * keys).sum(-1)
        return (
            BucketedTerms(
                self.key.bucket,
                table=table.expand(q.shape[1], -1),
                left=TokenTableProduct(q, scale * keys[None]),
                right=TokenTableProduct(repeat_heads(k, q.shape[1]), scale * queries[None]),
                max_distance=self.max_distance,
            ),
        )


ENTRY = Entry(
    factory=contextual,
    summary="Adds a trained vector for each clipped offset to queries, keys and values.",
    sites=("score", "value"),
    relative=True,
    trainable=True,
    extrapolates="Degrades slowly: offsets beyond the clip distance share a vector.",
    cost="Q·K·H beside (Q + K)·(2k + 1)·D·H",
)
