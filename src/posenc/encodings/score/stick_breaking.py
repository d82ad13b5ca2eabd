"""Stick-breaking attention."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from posenc.encoding import Entry, FusedScore, ScoreTerm, StickWeights
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.grid import Grid

Remainder = Literal["self", "none"]


class StickBreaking(ScoreTerm):
    """Stick-breaking: earlier tokens, the nearest first, take a fraction of the remaining weight.

    ``A_ij = β_ij · Π_{j<t<i} (1 - β_it)``, ``β_ij = σ(scale · q_i·k_j)``, in place of the softmax;
    the remaining weight, ``Π_{t<i} (1 - β_it)``, goes to the query's own value.

    β in (0, 1), a share of the stick; the product runs over the keys that the query sees, by order.
    The weights of a row sum to 1 with ``remainder="self"``, to less without. All is summed in
    logarithms, so that long products do not vanish. Positions are not read. Differs from the paper
    in nothing.

    Args:
        remainder: ``"self"`` adds the remaining weight to the token itself, as the authors' models
            do; ``"none"`` drops it.

    Raises:
        UnknownNameError: for another ``remainder``.

    Reference: Tan et al. 2024, "Scaling Stick-Breaking Attention: An Efficient Implementation and
    In-depth Study", https://arxiv.org/abs/2410.17980.

    >>> import posenc, torch
    >>> layout = posenc.Layout.sequence(3)
    >>> q = torch.zeros(1, 1, 3, 4)
    >>> grid = posenc.Grid.of(layout, causal=True)
    >>> posenc.create("stick_breaking").score(q, q, grid, scale=1.0).exp()[0, 0, 2].tolist()
    [0.25, 0.5, 0.25]
    """

    causal_only = True
    pairwise = False
    axes = None
    replaces_product = True
    replaces_softmax = True

    remainder: Remainder = "self"

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logits = q @ k.mT * scale
        before = grid.key.order.unsqueeze(1) < grid.query.order.unsqueeze(2)
        breaks = grid.visible & before.unsqueeze(1)
        left = logsigmoid(-logits).masked_fill(~breaks, 0.0)
        taken = logsigmoid(logits) + KeyRanks.of(grid).after_key(left)
        if self.remainder == "none":
            return taken.masked_fill(~breaks, -torch.inf)
        # Tokens of the query's own order share the remaining weight.
        here = grid.visible & ~before.unsqueeze(1)
        rest = left.sum(-1, keepdim=True) - here.sum(-1, keepdim=True).clamp(min=1).log()
        return torch.where(breaks, taken, rest)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        return StickWeights(rest_to_self=self.remainder == "self")


ENTRY = Entry(
    factory=StickBreaking,
    summary="Gives each token before the query, nearest first, a fraction of the remaining weight.",
    relative=True,
    trainable=False,
    extrapolates="Holds well past the training length: near tokens take the weight first.",
    cost="Q·K·H",
    sharing="layers",
)
