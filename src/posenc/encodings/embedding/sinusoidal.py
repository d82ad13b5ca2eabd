"""Sinusoidal absolute positions."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.table import Fusion, fuse
from posenc.errors import ArgumentError
from posenc.layout import Layout

Arrangement = Literal["interleaved", "concatenated", "whisper"]


class Sinusoidal(EmbeddingEncoding):
    """Sinusoidal positions: each position is a vector of sines and cosines of falling frequency.

    ``P[p, 2t] = sin(p · ω_t)``, ``P[p, 2t+1] = cos(p · ω_t)``, ``ω_t = base^(-2t/C)``
    (section 3.5); the output is ``x + P`` (or ``x · P``).

    ``p`` is the position ``[B|1, L]`` in tokens, any real; ``C`` the model's width; ``ω_t`` in
    radians a token. ``P(p + k)`` is a rotation of ``P(p)`` that does not depend on p.

    Differs from the paper in nothing with the default options. ``arrangement="concatenated"``
    puts all sines before all cosines; ``"whisper"`` does that with
    ``ω_t = base^(-t/(C/2 - 1))``, so that the slowest frequency is exactly 1/base.

    Args:
        dim: width C; may be odd (one more sine than cosines), except for "whisper".
        base: ratio of the fastest frequency to the slowest (its limit, for the paper's form).
        arrangement: order of sines and cosines, see above.
        fusion: ``"add"`` to the token vectors or ``"multiply"`` them.

    Raises:
        ArgumentError: when ``dim`` or ``base`` is out of its domain.
        UnknownNameError: for another ``arrangement`` or ``fusion``.

    Reference: Vaswani et al. 2017, "Attention Is All You Need", https://arxiv.org/abs/1706.03762.

    >>> import posenc, torch
    >>> encoding = posenc.create("sinusoidal", dim=4)
    >>> encoding.embed(torch.zeros(1, 2, 4), posenc.Layout.sequence(2))[0, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """

    dim: Width
    base: Base = 10000.0
    arrangement: Arrangement = "interleaved"
    fusion: Fusion = "add"

    def __post_init__(self) -> None:
        if self.arrangement == "whisper" and (self.dim < 4 or self.dim % 2):
            raise ArgumentError(
                "dim",
                expected="an even number from 4",
                got=self.dim,
                remedy="Use the width of the token vectors.",
            )

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        return fuse(x, self.table(layout.positions[..., 0]), self.fusion)

    def table(self, positions: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims C"]:
        """``P`` at any real positions, in their dtype."""
        sines = -(-self.dim // 2)
        width = 2 * (sines - 1) if self.arrangement == "whisper" else self.dim
        angles = geometric_angles(positions.unsqueeze(-1), sines, width, self.base)
        sine, cosine = angles.sin(), angles[..., : self.dim // 2].cos()
        if self.arrangement != "interleaved":
            return torch.cat([sine, cosine], dim=-1)
        table = positions.new_empty(*positions.shape, self.dim)
        table[..., 0::2] = sine
        table[..., 1::2] = cosine
        return table


ENTRY = Entry(
    factory=Sinusoidal,
    summary="Adds sines and cosines of decreasing frequency to the token vectors.",
    relative=False,
    trainable=False,
    extrapolates="Breaks soon past the training length.",
    cost="L·C once",
    sharing="layers",
)
