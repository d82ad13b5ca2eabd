"""Logits scaled by the logarithm of the length."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import (
    Encoding,
    LowRank,
    Part,
    QueryKeyTransform,
    ScoreTerm,
    StructuredScore,
    TokenTableProduct,
)
from posenc.encoding.parts import Projection
from posenc.encoding.tensors import Features, Keys, Queries, Scores, StructuredTerms
from posenc.extension.banded import BandedRope
from posenc.extension.entry import Extension
from posenc.extension.fitting import NotApplicable, Trained
from posenc.extension.varying import seen_lengths
from posenc.grid import Grid
from posenc.layout import Layout

SHARED = ("axes", "causal_only", "heads", "head_dim", "dim", "causal", "mixes_heads")
"""Attributes of a part that a wrapper has too."""


def log_n(encoding: Encoding, *, length: Trained) -> Encoding:
    """Log-n scaling: logits of a query among n > L tokens are multiplied by ``ln n / ln L``.

    ``s_ij → κ_i s_ij`` with ``κ_i = max(1, ln n_i / ln L)``, biases included. With a causal mask
    n_i is ``p_i + 1``, so that decoding equals one pass; otherwise the largest key position + 1 of
    the row or document. ``L`` is ``length`` in tokens. It keeps the entropy of attention from
    growing with the length, and is joined to other methods:
    ``extend(encoding, "rerope+log_n", …)``. Cost: Q·D·H; a constant bias table is no longer
    constant. Differs from the source in nothing.

    Args:
        encoding: any with softmax weights.
        length: L, the trained length.

    Raises:
        ArgumentError: if the weights are no softmax (stick_breaking), or ``length`` is below 2.

    Reference: Su 2021, "Scale operation of attention from entropy invariance",
    https://kexue.fm/archives/8823; Chiang and Cholak 2022, "Overcoming a Theoretical Limitation of
    Self-Attention".

    >>> import posenc
    >>> from posenc.extension import log_n
    >>> log_n(posenc.create("alibi", heads=4), length=64).score
    LogNScore(
      length=64
      (inner): Alibi(heads=4)
    )
    """
    score = encoding.score
    if score is not None and score.replaces_softmax:
        raise NotApplicable.of("log_n", "weights that are a softmax", encoding)
    linear = isinstance(score, BandedRope)  # its logits are, in the queries
    replaced_logits = score is not None and score.replaces_product and not linear
    return Encoding(
        embedding=encoding.embedding,
        query_key=encoding.query_key
        if replaced_logits
        else LogN(inner=encoding.query_key, length=length),
        score=score if score is None or linear else LogNScore(inner=score, length=length),
        value=encoding.value,
    )


def log_factor(grid: Grid, length: float) -> Float[Tensor, "b q"]:
    """κ of each query, ``[B|1, Q|1]``."""
    lengths = grid.query.positions[..., 0] + 1 if grid.causal else seen_lengths(grid)[0]
    return lengths.clamp(min=length).log() / math.log(length)


class _Scaled(Part):
    """Common to both parts: all they take from the one inside."""

    inner: Part | None
    length: float
    pairwise = False

    def observe(self, x: Features, layout: Layout) -> Layout:
        return layout if self.inner is None else self.inner.observe(x, layout)

    def attach(self, query: Projection, key: Projection) -> None:
        if self.inner is not None:
            self.inner.attach(query, key)


class LogN(_Scaled, QueryKeyTransform):
    """Queries scaled by κ after an optional transform; see ``log_n``."""

    inner: QueryKeyTransform | None

    def __post_init__(self) -> None:
        if self.inner is None:
            self.__dict__["axes"] = None
        else:
            _take_over(self, self.inner, "scale", "tokenwise", "views", "widening")

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Tensor, Tensor]:
        if self.inner is not None:
            q, k = self.inner(q, k, grid)
        return (q * _columns(log_factor(grid, self.length))).to(q.dtype), k


class LogNScore(_Scaled, ScoreTerm):
    """A score part scaled by κ; see ``log_n``."""

    reads_layout = True

    inner: ScoreTerm

    def __post_init__(self) -> None:
        _take_over(self, self.inner, "terms", "replaces_product")

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        factor = _columns(log_factor(grid, self.length))
        scores: Tensor = self.inner(self._plain(q, factor), k, grid, scale=scale)
        return scores * factor.to(torch.promote_types(scores.dtype, factor.dtype))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        factor = _columns(log_factor(grid, self.length))
        terms = self.inner.lower(self._plain(q, factor), k, grid, scale=scale)
        scaled = None if terms is None else [_scaled(term, factor, grid) for term in terms]
        if scaled is None or None in scaled:
            return None
        return tuple(term for times in scaled for term in times or ())

    def _plain(self, q: Tensor, factor: Tensor) -> Tensor:
        """Queries before the scaling by ``LogN``."""
        return q if self.replaces_product else (q / factor).to(q.dtype)


def _scaled(
    term: StructuredScore, factor: Float[Tensor, "b 1 q 1"], grid: Grid
) -> StructuredTerms | None:
    """The term times κ; None if a term by offset depends on the content of the key."""
    if isinstance(term, LowRank):
        return (replace(term, query=term.query * factor),)
    if term.right is not None:
        return None
    queries = grid.query.length
    tokens, rows = [], []
    if term.left is not None:
        tokens.append(term.left.tokens * factor)
        rows.append(term.left.rows)
    if term.table is not None:
        tokens.append(factor.to(term.table).expand(-1, len(term.table), queries, -1))
        rows.append(term.table.unsqueeze(-1))
    left = None
    if tokens:
        batch, most = max(x.shape[0] for x in tokens), max(x.shape[1] for x in tokens)
        many = max(x.shape[0] for x in rows)
        left = TokenTableProduct(
            torch.cat([x.expand(batch, most, -1, -1) for x in tokens], dim=-1),
            torch.cat([x.expand(many, -1, -1) for x in rows], dim=-1),
        )
    row = None if term.row is None else term.row * factor.squeeze(-1)
    scaled = replace(term, table=None, left=left, row=row, column=None)
    if term.column is None:
        return (scaled,)
    query = factor.to(term.column).expand(-1, term.column.shape[1], queries, -1)
    return scaled, LowRank(query, term.column.unsqueeze(-1))


def _columns(factor: Float[Tensor, "b q"]) -> Float[Tensor, "b 1 q 1"]:
    return factor.unsqueeze(1).unsqueeze(-1)


def _take_over(part: Part, inner: Part, *names: str) -> None:
    """Give a wrapper the attributes of the part in it."""
    part.__dict__.update({name: getattr(inner, name) for name in (*SHARED, *names)})


ENTRY = Extension(
    function=log_n,
    summary="Multiplies the logits by the logarithm of the length.",
    on=("any",),
    short_unchanged=True,
    stays_relative=False,
    training="none",
    expect="A little better than the same without it, since attention stays as sharp.",
    cost="Q·D·H",
)
