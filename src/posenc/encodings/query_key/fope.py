"""Fourier series in place of RoPE's single frequencies."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated

import torch
from torch import Tensor, nn

from posenc.arguments import EXACT, Base, Count, EvenWidth, Interval, Magnitude
from posenc.encoding import Entry, Pairing
from posenc.encodings.common.precision import geometric_angles, wide_product
from posenc.encodings.common.rotation import PairProducts
from posenc.layout import Layout

PERIOD = "Pass the training length, which the period of the fastest pair must fit into."


class Fope(PairProducts):
    """FoPE: each pair of features is multiplied by a Fourier series of its position.

    ``q'_t = F_ht(p_i) q_t``, ``k'_t = F_ht(p_j) k_t``, pairs taken as complex numbers,
    ``F_ht(p) = Σ_m (δ_mt + a_hmt) cos(p · θ_m) + i Σ_m (δ_mt + b_hmt) sin(p · θ_m)``,
    ``θ_m = base^(-2m/D)``.

    ``p`` is a position in tokens, any real; ``θ_m`` in radians per token, m = 0 … M - 1: those with
    a full period within the training length N, ``θ_m ≥ 2π/N``. The slower pairs t ≥ M are
    unchanged. ``δ_mt`` is 1 where m = t, else 0; a and b ``[H, M, M]`` are drawn normal with
    standard deviation ``gain · √(2 / ((M + H)·M))`` from torch's generator, separately per layer,
    and saved; trained only with ``learned``. Special tokens are unchanged. With gain 0 it would be
    RoPE's fast pairs alone, which are relative. Grouped keys are repeated to one per query head,
    since series differ by head. Differs from the official code in two points: there the pairs t ≥ M
    are multiplied by 1 + i, which rotates them by 45° and doubles their products, though a wave of
    frequency 0 is 1; and at most D/4 pairs carry a series (at 512 tokens, D = 64 and base 10000, M
    is D/4 anyway).

    Args:
        heads: query heads H.
        head_dim: width D of a head, even.
        max_length: N, the training length in tokens; 7 or more, so that M is at least 1.
        base: sets the frequencies, as in RoPE.
        gain: scale of the coefficients besides the dominant 1; 0.3 in the official code, more in
            larger models.
        learned: train the coefficients.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when an option is out of its domain.
        UnknownNameError: for another ``pairing``.

    Reference: Hua et al. 2024, "Fourier Position Embedding: Enhancing Attention's Periodic
    Extension for Length Generalization", https://arxiv.org/abs/2412.17739.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> posenc.create("fope", heads=2, head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 8])
    """

    heads: Count
    head_dim: EvenWidth
    max_length: Annotated[int, Interval(7, EXACT, remedy=PERIOD)] = 512
    base: Base = 10000.0
    gain: Magnitude = 0.3
    learned: bool = False
    pairing: Pairing = "half"

    coefficients: Tensor = field(init=False)
    """``[2, H, M, M]``: a and b, [.., m, t] of frequency m in pair t."""

    def __post_init__(self) -> None:
        width, slowest = self.head_dim, 2 * math.pi / self.max_length
        self.waves = sum(self.base ** (-2 * m / width) >= slowest for m in range(width // 2))
        drawn = torch.empty(2, self.heads, self.waves, self.waves)
        if self.learned:
            self.coefficients = nn.Parameter(drawn)
        else:
            self.register_buffer("coefficients", drawn)

    def reset_parameters(self) -> None:
        """Draw the coefficients."""
        with torch.no_grad():
            for drawn in self.coefficients:
                nn.init.xavier_normal_(drawn, gain=self.gain)

    def factors(self, layout: Layout) -> tuple[Tensor, Tensor]:
        angles = geometric_angles(layout.positions, self.waves, self.head_dim, self.base)
        parts = []
        for wave, coefficients, identity in zip(
            (angles.cos(), angles.sin()), self.coefficients, (1.0, 0.0), strict=True
        ):
            mixed = wide_product(wave, coefficients.mT.flatten(0, 1))
            mixed = mixed.view(*wave.shape[:-1], self.heads, self.waves)
            part = (mixed + wave.unsqueeze(-2)).transpose(1, 2)
            if layout.special is not None:
                part = part.masked_fill(layout.special[:, None, :, None], identity)
            slow = self.head_dim // 2 - self.waves
            parts.append(nn.functional.pad(part, (0, slow), value=identity))
        return parts[0], parts[1]


ENTRY = Entry(
    factory=Fope,
    summary="RoPE with a Fourier series in each pair, without periods above the training length.",
    relative=False,
    trainable=False,
    extrapolates="Degrades past the training length, more slowly than RoPE, as published.",
    cost="(Q + K)·(D + M²)·H, M frequencies",
)
