"""A plain table of biases by clipped offset."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Natural
from posenc.encoding import BucketedTerms, Entry, ScoreTerm
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import clipped_bucket
from posenc.grid import Grid

Placement = Literal["outside", "inside"]


class RelativeBias(ScoreTerm):
    """Relative bias: a learned number for each head and each clipped offset.

    ``s_ij = scale · q_i·k_j + b[h, n]`` (``placement="outside"``), or
    ``s_ij = scale · (q_i·k_j + b[h, n])`` (``"inside"``, equation 10), ``n = clip(Δ, -k, k) + k``.

    Δ = j - i in tokens (a fractional one is rounded); ``k = max_distance``; b ``[H, 2k + 1]``, in
    logits outside and in units of q·k inside. Differs from the paper, whose positions have two
    axes, in having one.

    Args:
        heads: H.
        max_distance: k; larger offsets share the last number on their side.
        placement: whether b is added ``"outside"`` the scaled product or ``"inside"`` it.

    Raises:
        ArgumentError: when ``heads`` or ``max_distance`` is out of its domain.
        UnknownNameError: for another ``placement``.

    Reference: Wu et al. 2021, "Rethinking and Improving Relative Position Encoding for Vision
    Transformer", https://arxiv.org/abs/2107.14222 (bias mode, with Shaw's clip function).

    >>> import posenc, torch
    >>> bias = posenc.create("relative_bias", heads=4, max_distance=2).score
    >>> bias.bucket(torch.tensor([[-9.0], [-1.0], [0.0], [2.0], [3.0]])).tolist()
    [0, 1, 2, 4, 4]
    """

    rows_by_position = True

    heads: Count
    max_distance: Natural = 16
    placement: Placement = "outside"

    def __post_init__(self) -> None:
        self.table = nn.Parameter(torch.empty(self.heads, 2 * self.max_distance + 1))

    def reset_parameters(self) -> None:
        """Draw initial values, normal with standard deviation 0.02."""
        nn.init.normal_(self.table, std=0.02)

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Column of each offset Δ ``[..., 1]``, 0 … 2k."""
        return clipped_bucket(offset, self.max_distance)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return self._biases(scale)[:, self.bucket(grid.offset)].transpose(0, 1)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        return (
            BucketedTerms(self.bucket, table=self._biases(scale), max_distance=self.max_distance),
        )

    def _biases(self, scale: float) -> Float[Tensor, "H N"]:
        """The table in logits."""
        return self.table * scale if self.placement == "inside" else self.table


ENTRY = Entry(
    factory=RelativeBias,
    summary="Adds a learned number for each head and clipped offset.",
    relative=True,
    trainable=True,
    extrapolates="Degrades slowly: offsets beyond the clip distance share a number.",
    cost="Q·K·H; a table of Q + K offsets on regular layouts",
)
