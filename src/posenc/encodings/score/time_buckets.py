"""Biases by distance and by difference of times, for recommenders."""

from __future__ import annotations

import torch
from torch import nn

from posenc.arguments import Buckets, Count, Natural, Positive
from posenc.encoding import BucketedTerms, Entry, ScoreTerm
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import clipped_bucket
from posenc.encodings.common.precision import wider
from posenc.encodings.common.special_tokens import has_special, zero_special_pairs
from posenc.grid import Grid


class TimeBuckets(ScoreTerm):
    """Time buckets: a learned number for the distance, and one for the time between two events.

    ``s_ij += a[h, clip(Δ_p, -k, k) + k] + b[h, min(⌊ln max(|Δ_t|, 1) / step⌋, N)]``.

    Positions have two axes, place and time: Δ_p = place of key j less that of query i (a fractional
    one is rounded), Δ_t their times' difference, both ways alike, in seconds or another unit that
    is the shortest told apart. Seconds since 1970 need positions in float64: ``Layout.at`` refuses
    float32, which holds every 128th of them. ``k = max_distance``; a ``[H, 2k + 1]``, b
    ``[H, N + 1]`` in logits. Pairs with a special token have no bias.

    Differs from HSTU's code in tables of each head (there one is for all), and in clipped
    distances; there the time of a query is that of the event after it, which is to be predicted: to
    have that, give queries positions with those times. HSTU has no softmax.

    Args:
        heads: H.
        max_distance: k; larger distances share the last number on their side.
        buckets: N; longer times share the last bucket.
        step: of ln |Δ_t|, the width of a bucket.

    Raises:
        ArgumentError: when an argument is out of its domain.

    Reference: Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential
    Transducers for Generative Recommendations", https://arxiv.org/abs/2402.17152, section 3.2.

    >>> import posenc, torch
    >>> score = posenc.create("time_buckets", heads=4).score
    >>> score.time_bucket(torch.tensor([[0.0, 1.0], [0.0, 2.0], [3.0, -3600.0]])).tolist()
    [0, 2, 27]
    """

    axes = (2,)
    by_position = True

    heads: Count
    max_distance: Natural = 128
    buckets: Buckets = 128
    step: Positive = 0.301

    def __post_init__(self) -> None:
        self.places = nn.Parameter(torch.empty(self.heads, 2 * self.max_distance + 1))
        self.times = nn.Parameter(torch.empty(self.heads, self.buckets + 1))

    def reset_parameters(self) -> None:
        """Draw initial values, normal with standard deviation 0.02, as the authors' code does."""
        nn.init.normal_(self.places, std=0.02)
        nn.init.normal_(self.times, std=0.02)

    def place_bucket(self, offset: Offsets) -> BucketIndex:
        """Column of ``a`` of each offset Δ ``[..., 2]``."""
        return clipped_bucket(offset, self.max_distance)

    def time_bucket(self, offset: Offsets) -> BucketIndex:
        """Column of ``b`` of each offset Δ ``[..., 2]``."""
        time = wider(offset[..., 1]).abs().clamp(min=1)
        return (time.log() / self.step).floor().clamp(max=self.buckets).long()

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        offset = grid.offset
        bias = self.places[:, self.place_bucket(offset)] + self.times[:, self.time_bucket(offset)]
        return zero_special_pairs(bias.transpose(0, 1), grid)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        if has_special(grid):
            return None
        return (
            BucketedTerms(self.place_bucket, table=self.places),
            BucketedTerms(self.time_bucket, table=self.times),
        )


ENTRY = Entry(
    factory=TimeBuckets,
    summary="Adds learned numbers for the distance and for the time between two events.",
    relative=True,
    trainable=True,
    extrapolates="Holds or degrades slowly: all far distances, and all long times, share a number.",
    cost="Q·K·H; tables of H·(2k + N + 2) numbers",
    sharing="layers",
)
