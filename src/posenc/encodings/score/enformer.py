"""Relative positions of Enformer and Borzoi, for genomes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Interval, Length, Width
from posenc.encoding import Entry
from posenc.encoding.tensors import Queries
from posenc.encodings.common.offset_features import Features, GlobalBiases, OffsetFeatures
from posenc.encodings.common.precision import wider
from posenc.errors import ArgumentError
from posenc.grid import Grid

SHORTEST = 3.0
"""Logarithm to base 2 of the shortest half-life, in positions."""

LEAST = 1e-8
"""Added to each gamma density before it is divided by the largest."""


class Enformer(OffsetFeatures):
    """Enformer: products with projected features of the distance and of its side.

    ``s_ij = (scale · q_i + u_h) · k_j + (scale · q_i + w_h) · W_h r(Δ)``, Δ = j - i in positions,
    ``r(Δ) = (f(|Δ|), sign(Δ) · f(|Δ|))`` ``[C]``; ``W_h`` ``[D, C]`` without bias; u and w
    ``[H, D]``. The scale is of queries alone, unlike ``transformer_xl``'s. With n = length:

    - ``enformer``: f has C/6 features of each of three kinds. Exponentials ``2^(-|Δ|/h_t)`` with
      half-lives from 8 to n, evenly on a log scale; masks ``1 if |Δ| < 2^t - 1 else 0``,
      t = 1 … C/6; densities of gamma distributions with means μ_t from 6n/C to n and standard
      deviation σ = 3n/C, ``g_t = |Δ|^(a-1) e^(-b|Δ|) b^a / Γ(a) + 1e-8``, ``a = (μ_t/σ)²``,
      ``b = μ_t/σ²``, divided by the largest of ``g_t(0)`` … ``g_t(n - 1)``.
    - ``borzoi``: C/2 masks, ``1 if |Δ| < (n + 1)^(2t/C) - 1 else 0``.

    So n shapes the features: it is that of the trained model, whatever is read later. Features are
    computed in float64. Enformer's weights were trained with a table in float32, off by up to
    0.0025 from these, since Γ(a) is large. (enformer-pytorch divides by the largest density at each
    distance instead, unless it is given ``use_tf_gamma``.) Differs in nothing else, but dropout of
    the features.

    Args:
        heads: H.
        head_dim: width D of a head.
        features: C, a multiple of 6, of Borzoi's 2. Enformer has 192, Borzoi 32.
        length: n, in positions. Enformer has 1536, Borzoi 4096.
        basis: the kinds of features.

    Raises:
        ArgumentError: when ``features`` cannot be divided among the kinds, or anything is out of
            its domain.

    Reference: Avsec et al. 2021, "Effective gene expression prediction from sequence by integrating
    long-range interactions", https://doi.org/10.1038/s41592-021-01252-x, methods; Linder et al.
    2025, "Predicting RNA-seq coverage from DNA sequence as a unifying model of gene regulation",
    https://doi.org/10.1038/s41588-024-02053-6.

    >>> import posenc, torch
    >>> masks = {"features": 4, "basis": "borzoi"}
    >>> score = posenc.create("enformer", heads=8, head_dim=64, **masks).score
    >>> odd, even = score.odd_even(torch.tensor([0.0, -38.0, 39.0]))
    >>> even.tolist()
    [[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    >>> odd.tolist()
    [[-0.0, -0.0], [1.0, 1.0], [-0.0, -1.0]]
    """

    heads: Count
    head_dim: Width
    features: Annotated[int, Interval(2, 2**16, multiple=2)] = 192
    length: Length = 1536
    basis: Literal["enformer", "borzoi"] = "enformer"

    def __post_init__(self) -> None:
        self.kinds = 3 if self.basis == "enformer" else 1
        if self.features % (2 * self.kinds):
            raise ArgumentError(
                "features",
                expected="a multiple of 6",
                got=self.features,
                remedy="Enformer has 192.",
            )
        self.biases = GlobalBiases(self.heads, self.head_dim, std=1.0)
        self.weight = nn.Parameter(torch.empty(self.heads, self.head_dim, self.features))

    def reset_parameters(self) -> None:
        """Draw the initial values of the weights, uniform as those of a linear layer."""
        bound = self.features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def odd_even(self, x: Float[Tensor, "*N"]) -> Features:
        """``-sign(x) f(|x|)``, since x = -Δ, and ``f(|x|)``."""
        x = wider(x).unsqueeze(-1)
        if self.basis == "borzoi":
            even = self._masks(x.abs(), (self.length + 1.0) ** (2 / self.features))
        else:
            kinds = self._exponentials(x.abs()), self._masks(x.abs(), 2.0), self._gammas(x.abs())
            even = torch.cat(kinds, dim=-1)
        return -x.sign() * even, even

    def _steps(self, first: float, last: float, like: Tensor) -> Float[Tensor, " F"]:
        count = self.features // (2 * self.kinds)
        return torch.linspace(first, last, count, dtype=like.dtype, device=like.device)

    def _exponentials(self, distance: Float[Tensor, "*N 1"]) -> Float[Tensor, "*N F"]:
        half_lives = 2 ** self._steps(SHORTEST, math.log2(self.length), distance)
        return 2 ** (-distance / half_lives)

    def _masks(self, distance: Float[Tensor, "*N 1"], base: float) -> Float[Tensor, "*N F"]:
        count = self.features // (2 * self.kinds)
        widths = base ** self._steps(1, count, distance) - 1
        return (distance < widths).to(distance)

    def _gammas(self, distance: Float[Tensor, "*N 1"]) -> Float[Tensor, "*N F"]:
        deviation = 3 * self.length / self.features
        mean = self._steps(2 * deviation, self.length, distance)
        shape, rate = (mean / deviation) ** 2, mean / deviation**2
        norm = shape * rate.log() - torch.lgamma(shape)

        def density(x: Tensor) -> Tensor:
            return (torch.xlogy(shape - 1, x) - rate * x + norm).exp() + LEAST

        trained = torch.arange(self.length, dtype=distance.dtype, device=distance.device)
        return density(distance) / density(trained.unsqueeze(-1)).amax(0)

    def constants(self) -> Hashable:
        """The settings of the features."""
        return self.basis, self.features, self.length

    def halves(self) -> tuple[Float[Tensor, "H D F"], Float[Tensor, "H D F"]]:
        """The weights of the features with a sign, and of those without."""
        for_even, for_odd = self.weight.chunk(2, dim=-1)
        return for_odd, for_even

    def vectors(self, scale: float) -> tuple[Float[Tensor, "H D"], Float[Tensor, "H D"]]:
        """u and w, which the scale of queries leaves as they are."""
        u, w = self.biases()
        return u / scale, w / scale

    def factors(self, q: Queries, grid: Grid) -> None:
        """None: features are of the distance, and no product of those of two positions."""


ENTRY = Entry(
    factory=Enformer,
    summary="Adds products with projected features of the distance, made for genomes.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length: W has not seen such features.",
    cost="Q·K·H beside Q·(Q + K)·D·H; Q·K·C·H on irregular layouts",
    sample={"features": 24, "length": 128},
)
