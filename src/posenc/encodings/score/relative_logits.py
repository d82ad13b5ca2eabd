"""Inkling's relative logits: profiles of a bias by distance, mixed anew by each query."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Positive, Width, checked
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm, TokenTableProduct
from posenc.encoding.entry import Entry
from posenc.encoding.tensors import (
    BucketIndex,
    Features,
    Keys,
    Offsets,
    Queries,
    Scores,
    StructuredTerms,
)
from posenc.encodings.common.buckets import gather_rows
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.log_factor import LogFactor
from posenc.encodings.common.precision import WideLinear, at_least_single
from posenc.grid import Grid
from posenc.layout import Layout

STD = 0.02
"""Standard deviation of initial values."""


@checked
def relative_logits(
    *,
    dim: Width,
    heads: Count,
    width: Width = 16,
    extent: Count = 1024,
    floor: Positive | None = None,
    alpha: Positive = 0.1,
) -> Encoding:
    """Relative logits: each query mixes learned profiles of a bias by distance.

    ``s_ij = τ_i · (scale · q_i · k_j + r_ih · P[:, i - j])`` for ``0 <= i - j < extent``, without
    the second term for other keys; ``r_ih = W_h x_i``,
    ``τ_i = 1 + alpha · ln(max(1, (p_i + 1) / floor))``, or 1 without ``floor``.

    i - j in tokens (a fractional one is rounded); x: the layer's input ``[B, L, C]``; W_h
    ``[width, C]`` a head; P ``[width, extent]``, in logits, shared by the heads, each layer with
    its own; p the query's position. With ``floor`` the logits depend on it, so the method is no
    longer relative. Inkling's sliding layers have an extent of their window and no floor; it has
    normed queries and keys with ``scale = 1/D``. Differs from its code in nothing else, except that
    documents in a pack each begin at position 0.

    Args:
        dim: width C of the layer's input.
        heads: H.
        width: of r; profiles that are mixed.
        extent: distances with a bias.
        floor: position from which on logits grow; None: they do not.
        alpha: growth of the logits by a factor of e in the position, beyond ``floor``.

    Raises:
        ArgumentError: when an argument is out of its domain.

    Reference: Thinking Machines Lab 2026, "Inkling", https://huggingface.co/thinkingmachines/Inkling.

    >>> import posenc, torch
    >>> encoding = posenc.create("relative_logits", dim=64, heads=8, floor=4096)
    >>> encoding.observe(torch.randn(1, 5, 64), posenc.Layout.sequence(5)).signal.shape
    torch.Size([1, 5, 128])
    """
    encoding = Encoding(score=RelativeLogits(dim=dim, heads=heads, width=width, extent=extent))
    if floor is None:
        return encoding
    return encoding.scaled(LogFactor(length=floor, growth=alpha, of_position=True))


class RelativeLogits(ScoreTerm):
    """Score part of ``relative_logits``: ``s_ij += r_ih · P[:, i - j]``."""

    dim: Width
    heads: Count
    width: Width = 16
    extent: Count = 1024

    def __post_init__(self) -> None:
        self.project = WideLinear(self.dim, self.heads * self.width, bias=False)
        self.profiles = nn.Parameter(torch.empty(self.width, self.extent))

    def reset_parameters(self) -> None:
        """Draw initial values, normal with standard deviation 0.02."""
        nn.init.normal_(self.project.weight, std=STD)
        nn.init.normal_(self.profiles, std=STD)

    def observe(self, x: Features, layout: Layout) -> Layout:
        return layout.with_signal(self.project(at_least_single(x)))

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Distance i - j of each offset Δ ``[..., 1]``; ``extent`` for those without a bias."""
        distance = -offset[..., 0].round()
        outside = (distance < 0) | (distance >= self.extent)
        return distance.masked_fill(outside, self.extent).long()

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return gather_rows(self._mixtures(grid), self._rows(), self.bucket(grid.offset))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        left = TokenTableProduct(self._mixtures(grid), self._rows())
        return (BucketedTerms(self.bucket, left=left, max_distance=self.extent),)

    def _mixtures(self, grid: Grid) -> Float[Tensor, "b H Q E"]:
        """r of the queries."""
        signal = require_signal(grid.query, "relative_logits", self.heads * self.width)
        return signal.view(*signal.shape[:2], self.heads, -1).transpose(1, 2)

    def _rows(self) -> Float[Tensor, "1 N E"]:
        """The profiles by distance, and a row of zeros."""
        return nn.functional.pad(self.profiles.T, (0, 0, 0, 1)).unsqueeze(0)


ENTRY = Entry(
    factory=relative_logits,
    summary="Adds learned profiles of a bias by distance, mixed anew by each query.",
    sites=("score",),
    relative=True,
    trainable=True,
    extrapolates="Holds: beyond the extent there is no bias, at any length.",
    cost="Q·K·H beside Q·N·E·H, N distances and E profiles; E·H numbers a cached token",
    sample={"extent": 6, "width": 4},
)
