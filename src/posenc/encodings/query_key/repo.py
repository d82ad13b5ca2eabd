"""RePo: RoPE at positions that a layer predicts from its input."""

from __future__ import annotations

from torch import nn

from posenc.arguments import Base, Count, EvenWidth, Width
from posenc.encoding import Entry, Pairing, QueryKeyTransform, Rotation, repeat_heads
from posenc.encoding.rotation import Factors
from posenc.encoding.tensors import Features, Keys, Queries
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.precision import (
    WideLinear,
    angles_at,
    at_least_single,
    geometric_frequencies,
    wider,
)
from posenc.encodings.common.rotation import both_sides, cos_sin
from posenc.grid import Grid
from posenc.layout import Layout

STD = 0.02
"""Standard deviation of initial values."""


class Repo(QueryKeyTransform):
    """RePo (context re-positioning): RoPE at real positions that each token predicts for each head.

    ``q'_i = R(z_ih) q_i``, ``k'_j = R(z_jh) k_j``, ``z_jh = w_h · (silu(W_g x_j) ⊙ W_c x_j)``.

    x: the layer's input ``[B, L, C]``; W_g, W_c ``[width, C]``, w ``[H, width]``, each layer with
    its own; R(z) rotates pair t by ``z · base^(-2t/D)`` radians. A query's logit depends on
    ``z_ih - z_jh``, and gradients flow through it. Positions in the text are not read: order comes
    from the causal mask alone. Differs from the authors' code only in that angles are not rounded
    to bfloat16; there the first layers keep RoPE.

    Args:
        dim: width C of the layer's input.
        heads: query heads H.
        head_dim: width D of a head.
        width: of what positions are predicted from; C/8 by default.
        base: sets the slowest frequency.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is odd, or an argument is out of its domain.
        UnknownNameError: for another ``pairing``.

    Reference: Li et al. 2025, "RePo: Language Models with Context Re-Positioning",
    https://arxiv.org/abs/2512.14391.

    >>> import posenc, torch
    >>> repo = posenc.create("repo", dim=16, heads=2, head_dim=8)
    >>> repo.observe(torch.randn(1, 3, 16), posenc.Layout.sequence(3)).signal.shape
    torch.Size([1, 3, 2])
    """

    axes = None

    dim: Width
    heads: Count
    head_dim: EvenWidth
    width: Count | None = None
    base: Base = 10000.0
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        width = max(1, self.dim // 8) if self.width is None else self.width
        self.gate = WideLinear(self.dim, width, bias=False)
        self.content = WideLinear(self.dim, width, bias=False)
        self.assign = WideLinear(width, self.heads, bias=False)

    def reset_parameters(self) -> None:
        """Draw initial values, normal with standard deviation 0.02."""
        for layer in (self.gate, self.content, self.assign):
            nn.init.normal_(layer.weight, std=STD)

    def observe(self, x: Features, layout: Layout) -> Layout:
        x = at_least_single(x)
        return layout.with_signal(self.assign(nn.functional.silu(self.gate(x)) * self.content(x)))

    def factors(self, layout: Layout) -> Factors:
        """Cosines and sines ``[b, H, L, T]`` of the tokens' angles."""
        z = require_signal(layout, "repo", self.heads).mT.unsqueeze(-1)  # [b, H, L, 1]
        theta = geometric_frequencies(self.head_dim // 2, self.head_dim, self.base, like=wider(z))
        return cos_sin(angles_at(z, theta))

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        query, key = both_sides(grid, self.factors)
        return Rotation(query, key, self.pairing).apply(q, repeat_heads(k, self.heads))

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        if k.shape[1] != self.heads:
            return None
        return Rotation(*both_sides(grid, self.factors), self.pairing)


ENTRY = Entry(
    factory=Repo,
    summary="Rotates queries and keys by positions that each token predicts for each head.",
    relative=True,
    trainable=True,
    extrapolates="Degrades less than RoPE: predicted positions need not grow with the text.",
    cost="(Q + K)·D·H; C²/4 parameters a layer and H numbers a cached token",
)
