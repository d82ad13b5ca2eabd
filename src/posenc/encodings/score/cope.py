"""Contextual positions."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import nn

from posenc.arguments import EXACT, Interval, Width
from posenc.encoding import Entry, FusedScore, GateCounts, ScoreTerm, TokenTableProduct
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.grid import Grid


class Cope(ScoreTerm):
    """CoPE: positions are sums of query-dependent gates of the tokens from a key to a query.

    ``g_ij = σ(scale · q_i·k_j)``, ``p_ij = min(Σ_{t=j..i} g_it, N - 1)``,
    ``s_ij += q_i · e(p_ij)``, ``e`` interpolated linearly between the rows of its table.

    The sum is over the keys that the query sees, by order; p in tokens counted, 0 … N - 1; ``e``
    ``[N, D]``, shared by the heads, each layer with its own, zero at first. Positions are not read.
    As in the paper's listing the gates read the scaled logits and ``q·e`` is not scaled (the
    authors' repository scales both unless told otherwise: the same but for a factor of e). Differs
    from the paper in nothing. Where all gates are 1 it is a table of clipped distances,
    ``e[min(i - j + 1, N - 1)]``.

    Args:
        head_dim: width D of a head.
        max_count: N, rows of the table; higher counts share the last row.

    Raises:
        ArgumentError: when ``head_dim`` is below 1 or ``max_count`` below 2.

    Reference: Golovneva et al. 2024, "Contextual Position Encoding: Learning to Count What's
    Important", https://arxiv.org/abs/2405.18719.

    >>> import posenc
    >>> posenc.create("cope", head_dim=32).score.rows.shape
    torch.Size([64, 32])
    """

    causal_only = True
    pairwise = False
    axes = None

    head_dim: Width
    max_count: Annotated[int, Interval(2, EXACT)] = 64

    def __post_init__(self) -> None:
        self.rows = nn.Parameter(torch.empty(self.max_count, self.head_dim))

    def reset_parameters(self) -> None:
        """Start at zero, as the authors' code does."""
        nn.init.zeros_(self.rows)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        gates = torch.sigmoid(q @ k.mT * scale).masked_fill(~grid.visible, 0.0)
        count = KeyRanks.of(grid).from_key(gates).clamp(max=self.max_count - 1)
        products = q @ self.rows.to(q).mT
        low = count.detach().floor().clamp(max=self.max_count - 2)
        share = count - low
        at = low.nan_to_num(0.0).long()  # as overflows under autocast leave counts that are none
        below, above = (products.gather(-1, at + step) for step in (0, 1))
        return below + share * (above - below)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return GateCounts(TokenTableProduct(q, self.rows[None]))


ENTRY = Entry(
    factory=Cope,
    summary="Adds the query's product with a vector at a position that is a sum of gates.",
    relative=True,
    trainable=True,
    extrapolates="Fair: counts beyond the table share a row; they grow slower than positions.",
    cost="Q·K·H beside Q·N·D·H",
)
