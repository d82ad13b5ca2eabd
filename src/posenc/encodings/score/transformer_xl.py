"""Transformer-XL's relative sinusoids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Count, EvenWidth, Width
from posenc.encoding import Entry
from posenc.encoding.tensors import Queries
from posenc.encodings.common.offset_features import Features, GlobalBiases, OffsetFeatures
from posenc.encodings.common.precision import geometric_angles, wider
from posenc.grid import Grid

STD = 0.02
"""Standard deviation of all initial values, in Transformer-XL and in XLNet."""


class TransformerXL(OffsetFeatures):
    """Transformer-XL: products with projected sinusoids of the offset, and two trained vectors.

    ``s_ij = scale · ((q_i + u_h) · k_j + (q_i + w_h) · W_h r(i - j))`` (section 3.3; w is their
    v), ``r(x)[t] = sin(x · ω_t)``, ``r(x)[C/2 + t] = cos(x · ω_t)``, ``ω_t = base^(-2t/C)``.

    i - j in tokens, any real and never clipped; r ``[C]``, all sines before all cosines; ``W_h``
    ``[D, C]`` without bias, each layer's own; u and w ``[H, D]``, shared by all layers (not in
    ``xlnet``). The reference code finds the terms by padding and reshaping ("relative shift"); here
    each pair is computed from its own offset, so queries and keys may have any lengths and
    positions. Cached keys carry their layout: that is the segment memory.

    On irregular layouts the second term is of rank C, by the sum of angles. Unlike the paper's,
    attention may be bidirectional.

    Args:
        dim: width C of the model and of r; even.
        heads: H.
        head_dim: width D of a head.
        base: ratio of the fastest frequency to the slowest (its limit).

    Raises:
        ArgumentError: when ``dim`` is odd or anything is out of its domain.

    Reference: Dai et al. 2019, "Transformer-XL: Attentive Language Models Beyond a Fixed-Length
    Context", https://arxiv.org/abs/1901.02860.

    >>> import posenc
    >>> first, second = posenc.create_layers("transformer_xl", layers=2, dim=64, heads=4)
    >>> first.score.biases is second.score.biases, first.score.weight is second.score.weight
    (True, False)
    """

    dim: EvenWidth
    heads: Count
    head_dim: Width
    base: Base = 10000.0

    def __post_init__(self) -> None:
        self.biases = GlobalBiases(self.heads, self.head_dim, std=STD)
        self.weight = nn.Parameter(torch.empty(self.heads, self.head_dim, self.dim))

    def reset_parameters(self) -> None:
        """Draw the initial values of this layer's own weights."""
        nn.init.normal_(self.weight, std=STD)

    def odd_even(self, x: Float[Tensor, "*N"]) -> Features:
        """``sin(x · ω)`` and ``cos(x · ω)``."""
        angles = geometric_angles(wider(x).unsqueeze(-1), self.dim // 2, self.dim, self.base)
        return angles.sin(), angles.cos()

    def constants(self) -> Hashable:
        """The width and the base of sines and cosines."""
        return self.dim, self.base

    def halves(self) -> tuple[Float[Tensor, "H D F"], Float[Tensor, "H D F"]]:
        """The weights of sines and of cosines."""
        for_sines, for_cosines = self.weight.chunk(2, dim=-1)
        return for_sines, for_cosines

    def vectors(self, scale: float) -> tuple[Float[Tensor, "H D"], Float[Tensor, "H D"]]:
        """u and w, whatever the scale."""
        u, w = self.biases()
        return u, w

    def factors(
        self, q: Queries, grid: Grid
    ) -> tuple[Float[Tensor, "B H Q C"], Float[Tensor, "b H K C"]]:
        """Two factors of ``q_i · W r(i - j)``, by the sine and cosine of a difference.

        With a = Wᵀq, whose halves belong to sines and cosines, the product with r(i - j) is
        ``(a_s sin i + a_c cos i) · cos j + (a_c sin i - a_s cos i) · sin j``, at every frequency.
        """
        for_sines, for_cosines = (q @ self.weight.to(q)).chunk(2, dim=-1)
        sine, cosine = self._sin_cos(grid.query.positions, q)
        key_sine, key_cosine = self._sin_cos(grid.key.positions, q)
        rotated = (for_sines * sine + for_cosines * cosine, for_cosines * sine - for_sines * cosine)
        key_waves = torch.cat([key_cosine, key_sine], dim=-1)
        return torch.cat(rotated, dim=-1), key_waves.expand(-1, q.shape[1], -1, -1)

    def _sin_cos(self, positions: Float[Tensor, "b L 1"], like: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = self.odd_even(positions[..., 0].unsqueeze(1))
        return sine.to(like), cosine.to(like)


def _share(layers: Sequence[TransformerXL]) -> None:
    for layer in layers[1:]:
        layer.biases = layers[0].biases


ENTRY = Entry(
    factory=TransformerXL,
    summary="Adds products with projected sinusoids of the offset, and two trained vectors.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length: farther sinusoids are new to W.",
    cost="Q·K·H beside Q·(Q + K)·D·H; Q·K·C·H on irregular layouts",
    sharing=_share,
)
