"""Rotary positions with the imaginary part of the product."""

from __future__ import annotations

import torch

from posenc.arguments import Base, Width
from posenc.encoding import Entry, Pairing, QueryKeyTransform, Rotation
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.grid import Grid


class RopePp(QueryKeyTransform):
    """RoPE++: every second head uses the imaginary part of RoPE's complex product.

    ``s_ij = scale · Re Σ_t q_it · conj(k_jt) · exp(i (p_i - p_j) θ_t)`` in heads 1, 3, … and
    ``s_ij = scale · Im Σ_t q_it · conj(k_jt) · exp(i (p_i - p_j) θ_t)`` in heads 2, 4, …; pairs of
    features are complex numbers, ``θ_t = base^(-2t/D)``.

    ``p`` is a position in tokens, any real; ``θ_t`` in radians per token, t = 0 … D/2 - 1. The
    imaginary part is RoPE's product with the query rotated by -90°. Heads 2n - 1 and 2n share their
    query, key and value: ``Attention`` projects half as many queries as it has heads and, by
    default, half as many keys and values. (With separate queries it would be RoPE in other
    coordinates: a projection can undo the 90°.) RoPE++_EH is ``Attention(heads=H)``, with half of
    RoPE's projections and cache; RoPE++_EC is ``heads=2H`` with an explicit ``head_dim``, with
    RoPE's projections and cache and twice the heads. For ``attend``, repeat each query twice in a
    row. Special tokens have angle 0. Differs from the paper in nothing.

    Args:
        head_dim: width D of a head, even.
        base: sets the slowest frequency.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is odd or zero, or ``base`` is not above 1; in
            ``forward``, for an odd number of query heads.
        UnknownNameError: for another ``pairing``.

    Reference: Liu et al. 2025, "Beyond Real: Imaginary Extension of Rotary Position Embeddings for
    Long-Context LLMs", https://arxiv.org/abs/2512.07525.

    >>> import posenc, torch
    >>> encoding = posenc.create("rope_pp", head_dim=8)
    >>> attention = posenc.Attention(dim=32, heads=4, encoding=encoding)
    >>> layers = attention.query, attention.key, attention.output
    >>> [tuple(layer.weight.shape) for layer in layers]
    [(16, 32), (16, 32), (32, 32)]
    """

    views = 2

    head_dim: Width
    base: Base = 10000.0
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        self.rope = Rope(head_dim=self.head_dim, base=self.base, pairing=self.pairing)

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        if q.shape[1] % 2:
            raise ArgumentError(
                "q",
                expected="an even number of heads, a real and an imaginary one per query",
                got=q.shape[1],
                remedy="Repeat each query: q.repeat_interleave(2, dim=1).",
            )
        q, k = self.rope(q, k, grid)
        real, imaginary = q[:, 0::2], self._rotated_back(q[:, 1::2])
        return torch.stack([real, imaginary], dim=2).flatten(1, 2), k

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        rotation = self.rope.lower(q, k, grid)
        if rotation is None or q.shape[1] % 2:
            return None
        cosine, sine = rotation.query
        # Multiplication by -i rotates by -90°: -i (c + i s) = s - i c.
        pairs = torch.cat([cosine, sine], dim=1), torch.cat([sine, -cosine], dim=1)
        first, second = (factor.repeat(1, q.shape[1] // 2, 1, 1) for factor in pairs)
        return Rotation((first, second), rotation.key, rotation.pairing)

    def _rotated_back(self, q: Queries) -> Queries:
        """Each pair (a, b) rotated by -90°, to (b, -a)."""
        if self.pairing == "half":
            first, second = q.chunk(2, dim=-1)
            return torch.cat([second, -first], dim=-1)
        return torch.stack([q[..., 1::2], -q[..., 0::2]], dim=-1).flatten(-2)


ENTRY = Entry(
    factory=RopePp,
    summary="RoPE in which every second head uses the imaginary part of the product.",
    relative=True,
    trainable=False,
    extrapolates="Degrades past the training length, later than RoPE, as published.",
    cost="(Q + K)·D·H; half the projections and cache",
    sharing="layers",
)
