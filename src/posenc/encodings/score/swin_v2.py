"""Swin v2's continuous position biases and cosine logits."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Width, checked
from posenc.encoding import BucketedTerms, Encoding, Entry, QueryKeyTransform, ScoreTerm
from posenc.encoding.prepared import constant, reused
from posenc.encoding.tensors import Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.precision import WideLinear
from posenc.encodings.common.special_tokens import has_special, zero_special_pairs
from posenc.encodings.common.window import Window
from posenc.grid import Grid

Logits = Literal["cosine", "dot"]


@checked
def swin_v2(
    *,
    heads: Count,
    window: tuple[Count, Count] = (8, 8),
    hidden: Width = 512,
    logits: Logits = "cosine",
) -> Encoding:
    """Swin v2: a small MLP of log-spaced offsets gives the bias; logits are scaled cosines.

    ``s_ij = τ_h · cos(q_i, k_j) + 16 · σ(f_h(u(Δ'_y), u(Δ'_x)))``,
    ``u(Δ') = sign(Δ') · log2(1 + 8|Δ'| / (M - 1)) / log2(8)``.

    Δ' = (row, column) of query i less that of key j, in cells, any real; M the side of ``window``
    along that axis; f: two numbers, one hidden ReLU layer, H logits; ``τ_h`` as in
    ``CosineLogits``. Offsets beyond the window are valid too, as in fine-tuning at a larger window:
    keep ``window`` at the size first trained at. An axis of one cell has u = 0. Pairs with a
    special token have no bias. Differs from the authors' code in nothing but axes of one cell,
    where that divides by zero.

    Args:
        heads: H.
        window: (height, width) in cells, by which offsets are scaled.
        hidden: width of the hidden layer.
        logits: ``"cosine"``, or ``"dot"`` for the usual product (a record of the bias alone).

    Raises:
        ArgumentError: when ``heads``, ``hidden`` or a side of ``window`` is below 1.
        UnknownNameError: for other ``logits``.

    Reference: Liu et al. 2021, "Swin Transformer V2: Scaling Up Capacity and Resolution",
    https://arxiv.org/abs/2111.09883.

    >>> import posenc
    >>> encoding = posenc.create("swin_v2", heads=4)
    >>> encoding.default_scale(32), encoding.score.output.weight.shape
    (1.0, torch.Size([4, 512]))
    """
    bias = SwinV2Bias(heads=heads, window=window, hidden=hidden)
    return Encoding(query_key=CosineLogits(heads=heads) if logits == "cosine" else None, score=bias)


class CosineLogits(QueryKeyTransform):
    """Scaled cosine logits: ``s_ij = τ_h · cos(q_i, k_j)``, with a learned factor per head.

    ``q'_i = τ_h · q_i / ‖q_i‖``, ``k'_j = k_j / ‖k_j‖``; an encoding with this part has a default
    scale of 1. ``τ_h = exp(min(log_scale_h, log 100))``, initially 10. Carries no positions; used
    by Swin v2 together with its bias. Cost: (Q + K)·D·H; H parameters.

    Args:
        heads: H.

    Raises:
        ArgumentError: when ``heads`` is below 1, or queries come with another number of heads.

    Reference: Liu et al. 2021, "Swin Transformer V2: Scaling Up Capacity and Resolution".
    """

    axes = None
    scale = 1.0

    INITIAL, MAXIMUM = 10.0, 100.0
    """Initial and largest τ."""

    heads: Count

    def __post_init__(self) -> None:
        self.log_scale = nn.Parameter(torch.empty(self.heads))

    def reset_parameters(self) -> None:
        """Start at τ = 10."""
        nn.init.constant_(self.log_scale, math.log(self.INITIAL))

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = self.log_scale.to(wide).clamp(max=math.log(self.MAXIMUM)).exp().view(-1, 1, 1)
        q_unit, k_unit = (nn.functional.normalize(x.to(wide), dim=-1) for x in (q, k))
        return (factor * q_unit).to(q.dtype), k_unit.to(k.dtype)


class SwinV2Bias(ScoreTerm):
    """The bias of ``swin_v2``: ``s_ij += 16 · σ(f_h(u(Δ'_y), u(Δ'_x)))``."""

    axes = (2,)
    by_position = True

    WIDEST = 8.0
    """Scaled value of the window's last offset."""

    MOST = 16.0
    """Upper limit of the bias; the lower one is 0."""

    heads: Count
    window: tuple[Count, Count] = (8, 8)
    hidden: Width = 512

    def __post_init__(self) -> None:
        self.input = WideLinear(2, self.hidden)
        self.output = WideLinear(self.hidden, self.heads, bias=False)

    def reset_parameters(self) -> None:
        """Draw weights, normal with standard deviation 0.02, as the authors' code does."""
        nn.init.trunc_normal_(self.input.weight, std=0.02)
        nn.init.zeros_(self.input.bias)
        nn.init.trunc_normal_(self.output.weight, std=0.02)

    def coordinates(self, offset: Offsets) -> Offsets:
        """u of each axis, from offsets Δ = key - query; ±log2(9)/log2(8) at the window's ends."""
        largest = constant(self.window, like=offset) - 1
        # An axis of one cell has one offset, 0; it stays 0.
        scaled = torch.where(largest > 0, -offset * self.WIDEST / largest.clamp(min=1), 0.0)
        return scaled.sign() * torch.log2(scaled.abs() + 1) / math.log2(self.WIDEST)

    def bias(self, offset: Offsets) -> Float[Tensor, "H *dims"]:
        """The bias of every head at any offsets Δ, in the offsets' float32 or float64."""
        hidden = torch.relu(self.input(self.coordinates(offset)))
        logits: Tensor = self.output(hidden)
        return self.MOST * logits.movedim(-1, 0).sigmoid()

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        offset = grid.offset
        window = _full_window(grid)
        if window is None:
            bias = self.bias(offset)
        else:
            bias = self._table(window, offset)[:, window.index(offset)]
        return zero_special_pairs(bias.transpose(0, 1), grid)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        window = _full_window(grid)
        if window is None or has_special(grid):
            return None
        like = grid.key.positions
        compute = partial(self._table, window, like)
        table = reused(compute, "table", self.window, window, like.dtype, layers=(self,))
        return (BucketedTerms(window.index, table=table),)

    def _table(self, window: Window, like: Tensor) -> Float[Tensor, "H N"]:
        return self.bias(window.offsets(device=like.device, dtype=like.dtype))


def _full_window(grid: Grid) -> Window | None:
    """The window that holds all offsets between whole images; None where they are not whole."""
    query, key = grid.query.extent, grid.key.extent
    if query is None or key is None:
        return None
    return Window(max(query[0], key[0]), max(query[1], key[1]))


ENTRY = Entry(
    factory=swin_v2,
    summary="Gives each head's bias by a small MLP of log-spaced offsets; logits are cosines.",
    sites=("query_key", "score"),
    relative=True,
    axes=(2,),
    trainable=True,
    extrapolates="Holds at moderately larger windows: offsets are on a log scale.",
    cost="Q·K·H beside (Q + K)·D·H; a table of offsets for whole images",
)
