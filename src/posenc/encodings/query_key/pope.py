"""Polar positions: content as magnitude, position as angle."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Count, Width
from posenc.encoding import Entry, QueryKeyTransform
from posenc.encoding.tensors import Keys, Queries, repeat_heads
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.rotation import kept_of_positions
from posenc.encodings.common.special_tokens import zero_special
from posenc.grid import Grid
from posenc.layout import Layout


class Pope(QueryKeyTransform):
    """PoPE: each feature becomes a complex number with content as magnitude, position as angle.

    ``⟨q'_i, k'_j⟩ = Σ_c softplus(q_ic) · softplus(k_jc) · cos((p_j - p_i) · θ_c + δ_hc)``,
    ``θ_c = base^(-c/D)``, c = 0 … D - 1: content does not affect the angle.

    ``p`` is a position in tokens, any real; ``θ_c`` in radians per token; δ ``[H, D]`` in radians,
    learned, clamped to -2π … 0, separate per layer. Transformed queries and keys have width 2D; the
    scale remains that of D. Special tokens have angle 0. Grouped keys are repeated to one per query
    head, since δ differs by head. Differs from the paper in nothing.

    Args:
        heads: query heads H.
        head_dim: width D of a head.
        base: sets the slowest frequency.
        initial: δ starts at 0 (``"zero"``, better past the training length) or uniform in
            -2π … 0 (``"uniform"``).

    Raises:
        ArgumentError: when ``heads`` or ``head_dim`` is below 1, or ``base`` is not above 1.
        UnknownNameError: for another ``initial``.

    Reference: Gopalakrishnan et al. 2025, "Decoupling the "What" and "Where" With Polar Coordinate
    Positional Embeddings", https://arxiv.org/abs/2509.10534.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> posenc.create("pope", heads=2, head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 16])
    """

    widening = 2

    heads: Count
    head_dim: Width
    base: Base = 10000.0
    initial: Literal["zero", "uniform"] = "zero"

    def __post_init__(self) -> None:
        self.phase = nn.Parameter(torch.empty(self.heads, self.head_dim))

    def reset_parameters(self) -> None:
        """Set δ to 0, or draw it uniformly from -2π … 0."""
        with torch.no_grad():
            if self.initial == "zero":
                self.phase.zero_()
            else:
                self.phase.uniform_(-2 * math.pi, 0.0)

    def angles(self, layout: Layout) -> Float[Tensor, "b 1 L D"]:
        """Angle of every token and feature in radians, in the positions' float32 or float64."""
        angles = geometric_angles(layout.positions, self.head_dim, 2 * self.head_dim, self.base)
        return zero_special(angles, layout).unsqueeze(1)

    def forward(
        self, q: Queries, k: Keys, grid: Grid
    ) -> tuple[Float[Tensor, "B H Q 2*D"], Float[Tensor, "B H K 2*D"]]:
        k = repeat_heads(k, self.heads)
        return _polar(q, self._waves(grid.query, "query")), _polar(k, self._waves(grid.key, "key"))

    def _bounded_phase(self) -> Float[Tensor, "h D"]:
        """The phase in its bounds, with a gradient on them too, where it starts.

        ``clamp`` has none there since PyTorch 2.15.
        """
        bounded = self.phase.detach().clamp(-2 * math.pi, 0.0)
        return self.phase.where(self.phase == bounded, bounded)

    def _waves(self, layout: Layout, side: Literal["query", "key"]) -> Float[Tensor, "b h L 2 D"]:
        """Cosines and sines of the angles, those of keys with the phase."""

        def compute(layout: Layout) -> Tensor:
            angles = self.angles(layout)
            if side == "key":
                angles = angles + self._bounded_phase().to(angles.dtype).unsqueeze(1)
            return torch.stack([angles.cos(), angles.sin()], dim=-2)

        return kept_of_positions(self, layout, compute, side)


def _polar(x: Float[Tensor, "B H L D"], waves: Float[Tensor, "b h L 2 D"]) -> Tensor:
    magnitude = nn.functional.softplus(x.to(torch.promote_types(x.dtype, waves.dtype)))
    return (magnitude.unsqueeze(-2) * waves).flatten(-2).to(x.dtype)


ENTRY = Entry(
    factory=Pope,
    summary="Encodes content as each feature's magnitude and position as its angle.",
    relative=True,
    trainable=True,
    extrapolates="Holds better than RoPE past the training length, as published.",
    cost="(Q + K)·2D·H; products of width 2D",
)
