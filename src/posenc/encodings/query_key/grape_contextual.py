"""GRAPE's contextual form: rotations by sums of token-dependent lengths."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, EvenWidth, Positive, Width
from posenc.encoding import Entry, QueryKeyTransform, Rotation
from posenc.encoding.tensors import Features, Keys, Queries
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.precision import WideLinear, at_least_single, geometric_frequencies
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.encodings.common.rotation import cos_sin
from posenc.grid import Grid
from posenc.layout import Layout


class GrapeContextual(QueryKeyTransform):
    """Contextual GRAPE-M: RoPE at positions that are sums of learned token lengths.

    ``q'_i = R(Φ_i) q_i``, ``k'_j = R(Φ_j) k_j``, R(Φ) rotating pair t by ``Φ · θ_t``, with
    ``Φ_i = Σ_{t<i} softplus(w · x_t + b)``.

    x: the layer's input ``[B, L, C]``; the softplus is the token's length, shared by the heads; θ
    ``[D/2]`` in radians per unit of length, learned, initially RoPE's; the sums run over the
    document's real tokens, by order, in float64. Positions are not read. Differs from the authors'
    code only in that angles are not rounded to bfloat16. With lengths of 1 it is RoPE.

    Args:
        dim: width C of the layer's input.
        head_dim: width D of a head.
        base: sets the initial frequencies.
        length: initial length of a token, positive; near 0 in the authors' code.

    Raises:
        ArgumentError: when ``dim`` is below 1, ``head_dim`` odd, or ``base`` or ``length`` out of
            its domain.

    Reference: Zhang et al. 2025, "Group Representational Position Encoding",
    https://arxiv.org/abs/2512.07805.

    >>> import posenc, torch
    >>> grape = posenc.create("grape_contextual", dim=16, head_dim=8)
    >>> layout = grape.observe(torch.randn(1, 3, 16), posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> grape.query_key(q, q, posenc.Grid.of(layout))[0].shape
    torch.Size([1, 2, 3, 8])
    """

    axes = None
    tokenwise = False
    pairwise = False  # angles are sums over earlier tokens

    dim: Width
    head_dim: EvenWidth
    base: Base = 10000.0
    length: Positive = 1e-3

    def __post_init__(self) -> None:
        self.gate = WideLinear(self.dim, 1)
        self.log_frequencies = nn.Parameter(torch.empty(self.head_dim // 2))

    def reset_parameters(self) -> None:
        """Set RoPE's frequencies and equal token lengths."""
        like, pairs = self.log_frequencies, self.head_dim // 2
        theta = geometric_frequencies(pairs, self.head_dim, self.base, like=like)
        # The inverse of softplus, in a form that does not overflow for large lengths.
        bias = self.length + math.log(-math.expm1(-self.length))
        with torch.no_grad():
            self.log_frequencies.copy_(theta.log())
            self.gate.weight.zero_()
            self.gate.bias.fill_(bias)

    def observe(self, x: Features, layout: Layout) -> Layout:
        return layout.with_signal(nn.functional.softplus(self.gate(at_least_single(x))))

    def phases(self, grid: Grid) -> tuple[Float[Tensor, "b Q"], Float[Tensor, "b K"]]:
        """Φ of every query and key."""
        query, key = (
            require_signal(side, type(self).__name__, 1)[..., 0] for side in (grid.query, grid.key)
        )
        if grid.key.valid is not None:
            key = key.masked_fill(~grid.key.valid, 0.0)
        until_query, until_key = KeyRanks.of(grid).running(key.unsqueeze(1))
        return until_query.squeeze(1) - query, until_key.squeeze(1) - key

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        return self.lower(q, k, grid).apply(q, k)

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation:
        wide, theta = torch.promote_types(q.dtype, torch.float32), self.log_frequencies
        angles = [phase.unsqueeze(-1) * theta.to(phase.dtype).exp() for phase in self.phases(grid)]
        query, key = ([x.to(wide) for x in cos_sin(angle)] for angle in angles)
        return Rotation((query[0], query[1]), (key[0], key[1]), "half")


ENTRY = Entry(
    factory=GrapeContextual,
    summary="Rotates queries and keys by sums of learned token lengths.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length as RoPE does, for equal token lengths.",
    cost="(Q + K)·D·H",
)
