"""Rotary positions with products that decay with distance."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Positive, Width
from posenc.encoding import Entry, Pairing, QueryKeyTransform, Rotation
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.query_key.rope import Rope
from posenc.grid import Grid

EXPONENT_FRACTION = 0.45
"""Fraction of a dtype's exponent range for scales: queries, keys and products stay finite."""


class Xpos(QueryKeyTransform):
    """xPos: RoPE with exponential scales on queries and keys, so that products decay with distance.

    ``q'_i = R(p_i) q_i · ζ^((p_i - c)/s)``, ``k'_j = R(p_j) k_j · ζ^((c - p_j)/s)``,
    ``ζ_t = (2t/D + γ) / (1 + γ)``, t = 0 … D/2 - 1, so that pair t of a product carries
    ``ζ_t^((p_i - p_j)/s)`` and the angle ``(p_j - p_i) · θ_t``.

    ``p`` is a position in tokens, any real; ``s`` in tokens; ``c``, in tokens, cancels. It is the
    middle of the call's queries, which prevents overflow: with a cache the newest tokens are near
    c, and scales of earlier keys are below 1. Causal only: products with keys ahead would grow with
    distance.

    Differs from the paper in nothing as long as the queries of one call span no more than
    ``2 s E / |ln ζ_0|`` tokens, where E is 0.45 of the largest exponent of the dtype: 32,000 for
    float32 and bfloat16, 4,000 for float16 with the defaults. Over a longer span scales are
    clamped for the tokens at its ends; pass long sequences in chunks.

    Args:
        head_dim: width D of a head.
        base: sets the slowest frequency.
        gamma: γ, above 0; larger values decay more slowly.
        scale_base: s, tokens over which pair t decays by ζ_t; infinite for plain RoPE.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is odd or zero, ``base`` is not above 1, or ``gamma`` or
            ``scale_base`` is not above 0.
        UnknownNameError: for another ``pairing``.

    Reference: Sun et al. 2022, "A Length-Extrapolatable Transformer",
    https://arxiv.org/abs/2212.10554.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.sequence(3), causal=True)
    >>> q = torch.randn(1, 2, 3, 8)
    >>> posenc.create("xpos", head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 8])
    """

    causal_only = True
    tokenwise = False

    head_dim: Width
    base: Base = 10000.0
    gamma: Positive = 0.4
    scale_base: Positive = 512.0
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        self.rope = Rope(head_dim=self.head_dim, base=self.base, pairing=self.pairing)

    def log_decay(self, *, like: Tensor) -> Float[Tensor, " T"]:
        """``ln ζ_t / s``, the logarithm of the decay per token of pair t; 0 or less."""
        steps = torch.arange(self.head_dim // 2, dtype=torch.float64) * (2 / self.head_dim)
        decay = torch.log((steps + self.gamma) / (1 + self.gamma)) / self.scale_base
        return decay.to(like)

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        return self.lower(q, k, grid).apply(q, k)

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation:
        rotation = self.rope.lower(q, k, grid)
        assert rotation is not None  # all heads have the same
        limit = EXPONENT_FRACTION * math.log(torch.finfo(q.dtype).max)
        scales = (x.exp().unsqueeze(1) for x in self._exponents(grid, limit=limit))
        query, key = (
            (cosine * scale, sine * scale)
            for (cosine, sine), scale in zip((rotation.query, rotation.key), scales, strict=True)
        )
        return Rotation(query, key, rotation.pairing)

    def _exponents(
        self, grid: Grid, *, limit: float
    ) -> tuple[Float[Tensor, "b Q T"], Float[Tensor, "b K T"]]:
        """Logarithms of the scales of queries and of keys."""
        queries, keys = (side.positions[..., :1] for side in (grid.query, grid.key))
        first, last = queries.amin(1, keepdim=True), queries.amax(1, keepdim=True)
        centre, half = (first + last) / 2, (last - first) / 2
        decay = self.log_decay(like=queries)
        query = ((queries - centre) * decay).clamp(-limit, limit)
        # Scales of keys before all queries may underflow, unless queries were clamped as well.
        largest = torch.where((half * decay).abs() <= limit, torch.inf, limit)
        key = -((keys - centre) * decay).clamp(min=-limit).minimum(largest)
        return query, key


ENTRY = Entry(
    factory=Xpos,
    summary="RoPE with products that decay with distance, fast pairs first.",
    relative=True,
    trainable=False,
    extrapolates="Degrades more slowly than RoPE past the training length.",
    cost="(Q + K)·D·H",
    sharing="layers",
)
