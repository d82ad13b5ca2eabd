"""Multiplicative positions with parameters shared by all positions."""

from __future__ import annotations

import torch
from torch import nn

from posenc.arguments import Base, Fraction, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.table import fuse
from posenc.encodings.embedding.multiplicative import bounded_gain
from posenc.layout import Layout


class MultiplicativeShared(EmbeddingEncoding):
    """Shared multiplicative positions: gains are sinusoids of position with trained amplitudes.

    ``x ⊗ g(p)``, ``g = 1 + b · tanh(w(p) / b)`` (or ``1 + w(p)`` without a bound),
    ``w_c(p) = u_c sin(ω_c p) + v_c cos(ω_c p)``, ``ω_c = base^(-c/C)`` for c = 0 … C-1.

    ``p`` in tokens, any real; u and v ``[C]`` trained, initially zero (the identity); gains are
    bounded to (1 - b, 1 + b). It has 2·C parameters at any length, where ``multiplicative`` has C
    per position. The source gives the product ``x ⊗ p`` and leaves the gains open.

    Args:
        dim: width C.
        base: ratio of the fastest frequency to the slowest (its limit).
        bound: b, largest difference of a gain from 1; None for no bound.

    Raises:
        ArgumentError: when ``dim``, ``base`` or ``bound`` is out of its domain.

    Reference: Su 2021, "Transformer position encodings that rack researchers' brains",
    https://kexue.fm/archives/8130, section on multiplicative positions.

    >>> import posenc, torch
    >>> encoding = posenc.create("multiplicative_shared", dim=4)
    >>> far = posenc.Layout.sequence(2, start=10**6)
    >>> encoding.embed(torch.ones(1, 2, 4), far)[0, 1].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    dim: Width
    base: Base = 10000.0
    bound: Fraction | None = 1.0

    def __post_init__(self) -> None:
        self.sine, self.cosine = (nn.Parameter(torch.empty(self.dim)) for _ in range(2))

    def reset_parameters(self) -> None:
        """Set gains to 1."""
        nn.init.zeros_(self.sine)
        nn.init.zeros_(self.cosine)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        angles = geometric_angles(layout.positions[..., :1], self.dim, 2 * self.dim, self.base)
        weights = self.sine.to(angles) * angles.sin() + self.cosine.to(angles) * angles.cos()
        return fuse(x, bounded_gain(weights, self.bound), "multiply")


ENTRY = Entry(
    factory=MultiplicativeShared,
    summary="Scales each feature of a token by a sinusoid of position with trained amplitudes.",
    relative=False,
    trainable=True,
    extrapolates="Any position exists and is bounded; use past the trained ones is uncertain.",
    cost="L·C once",
    sharing="layers",
)
