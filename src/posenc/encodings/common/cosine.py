"""Scaled cosine logits."""

from __future__ import annotations

import math

import torch
from torch import nn

from posenc.arguments import Count
from posenc.encoding import QueryKeyTransform
from posenc.encoding.tensors import Keys, Queries
from posenc.errors import ArgumentError
from posenc.grid import Grid


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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at τ = 10."""
        nn.init.constant_(self.log_scale, math.log(self.INITIAL))

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        if q.shape[1] != len(self.log_scale):
            raise ArgumentError(
                "q",
                expected=f"{len(self.log_scale)} heads, as the encoding has",
                got=q.shape[1],
                remedy="Create the encoding with the attention's heads.",
            )
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = self.log_scale.to(wide).clamp(max=math.log(self.MAXIMUM)).exp().view(-1, 1, 1)
        q_unit, k_unit = (nn.functional.normalize(x.to(wide), dim=-1) for x in (q, k))
        return (factor * q_unit).to(q.dtype), k_unit.to(k.dtype)
