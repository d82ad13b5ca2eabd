"""T5's bucketed relative biases."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import InitVar

import torch
from torch import nn

from posenc.arguments import Buckets, Count, Length, Width
from posenc.encoding import BucketedTerms, Entry, ScoreTerm
from posenc.encoding.prepared import constant
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores
from posenc.errors import ArgumentError
from posenc.grid import Grid


class T5(ScoreTerm):
    """T5 bias: a learned number for each head and bucket of offsets, wider buckets farther off.

    ``s_ij += b[h, bucket(Δ)]``, Δ = j - i in tokens, b ``[H, N]`` in logits.

    Half of a direction's n buckets hold one distance each; the other half divide the distances up
    to ``max_distance`` evenly on a log scale, and the last holds all beyond:
    ``bucket = n/2 + ⌊ln(2|Δ|/n) / ln(2·max_distance/n) · n/2⌋``. Bidirectional attention gives
    each direction N/2 buckets, keys ahead the upper ones; causal attention gives the past all N.
    Distances 16, 32 and 64 lie exactly on boundaries of the defaults, so boundaries are found in
    integers. A fractional distance falls in the bucket of its integer part.

    Differs from T5 in nothing here; T5 models also leave out the factor D^-1/2 of the logits: pass
    ``scale=1.0`` to attention for theirs.

    Args:
        heads: H.
        dim: width C; initial values have standard deviation C^-1/2, as in T5's code. 64 a head
            if not given, as in T5's models.
        causal: keys ahead are masked, so all buckets are for the past.
        buckets: N.
        max_distance: from here on all distances share a bucket.

    Raises:
        ArgumentError: when ``heads``, ``buckets`` or ``max_distance`` is out of its domain.

    Reference: Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer", https://arxiv.org/abs/1910.10683, section 2.1.

    >>> import posenc, torch
    >>> t5 = posenc.create("t5", heads=8).score
    >>> t5.bucket(torch.tensor([0.0, 7.0, 8.0, 16.0, -16.0, 999.0]).unsqueeze(-1)).tolist()
    [0, 23, 24, 26, 10, 31]
    """

    by_position = True

    heads: Count
    dim: InitVar[Width | None] = None
    causal: bool = False
    buckets: Buckets = 32
    max_distance: Length = 128

    def __post_init__(self, dim: int | None) -> None:
        step = 2 if self.causal else 4
        if self.buckets % step:
            raise ArgumentError(
                "buckets", expected=f"a multiple of {step}", got=self.buckets, remedy="T5 has 32."
            )
        one_way = self.buckets if self.causal else self.buckets // 2
        if self.max_distance <= one_way // 2:
            raise ArgumentError(
                "max_distance",
                expected=f"more than {one_way // 2}, the distances with a bucket of their own",
                got=self.max_distance,
                remedy="Raise it or use fewer buckets.",
            )
        self.std = (dim or 64 * self.heads) ** -0.5
        self.boundaries = log_boundaries(one_way, self.max_distance)
        self.table = nn.Parameter(torch.empty(self.heads, self.buckets))

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.table, std=self.std)

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Bucket of each offset Δ ``[..., 1]``, 0 … N-1."""
        delta = offset[..., 0]
        boundaries = constant(self.boundaries, like=delta)
        if self.causal:
            return torch.bucketize((-delta).clamp(min=0), boundaries, right=True)
        ahead = (delta > 0).long() * (self.buckets // 2)
        return ahead + torch.bucketize(delta.abs(), boundaries, right=True)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return self.table[:, self.bucket(grid.offset)].transpose(0, 1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> tuple[BucketedTerms]:
        return (BucketedTerms(self.bucket, table=self.table, max_distance=self.max_distance),)


def log_boundaries(buckets: int, max_distance: int) -> tuple[int, ...]:
    """Smallest distance in each bucket but the first, for one direction: ``buckets - 1`` integers.

    Bucket ``e + t`` (e = buckets/2, t ≥ 1) begins at the least n with
    ``(n/e)^(buckets-e) ≥ (max_distance/e)^t``, decided in integers.
    """
    exact = buckets // 2
    log_buckets = buckets - exact
    boundaries = list(range(1, exact + 1))
    distance = exact
    for step in range(1, log_buckets):
        least = max_distance**step * exact ** (log_buckets - step)
        candidates = range(distance, max_distance + 1)
        distance += bisect_left(candidates, least, key=lambda n: n**log_buckets)
        boundaries.append(distance)
    return tuple(boundaries)


ENTRY = Entry(
    factory=T5,
    summary="Adds a learned number for each head and bucket of offsets.",
    relative=True,
    trainable=True,
    extrapolates="Holds or degrades slowly: all far distances share a bucket.",
    cost="Q·K·H; a table of Q + K offsets on regular layouts",
    sharing="layers",
)
