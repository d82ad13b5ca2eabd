"""Rotary positions without the slowest frequencies."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, EvenWidth, Share
from posenc.encoding import Entry, Pairing
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.rotation import Rotary
from posenc.layout import Layout


class PRope(Rotary):
    """p-RoPE: RoPE on the fraction p of pairs with the highest frequencies only.

    Pair t is rotated by ``p_i · θ_t``, ``θ_t = base^(-2t/D)``, for the first ``int(p · D/2)``
    pairs; the others are not rotated. p = 1 is RoPE, p = 0 is NoPE.

    ``p_i`` is a position in tokens, any real; ``θ_t`` in radians a token. Differs from the paper in
    nothing. RoPE's ``fraction`` differs: it spreads frequencies from fast to slow over the first
    features of a head, while p drops the slow end of the frequencies of the whole head.

    Args:
        head_dim: width D of a head.
        p: fraction of rotated pairs, 0 to 1.
        base: sets the frequencies, as in RoPE.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is odd or zero, ``p`` is outside 0 to 1 or ``base`` is not
            above 1.
        UnknownNameError: for another ``pairing``.

    Reference: Barbero et al. 2024, "Round and Round We Go! What makes Rotary Positional Encodings
    useful?", https://arxiv.org/abs/2410.06205.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> posenc.create("p_rope", head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 8])
    """

    head_dim: EvenWidth
    p: Share = 0.75
    base: Base = 10000.0
    pairing: Pairing = "half"

    def angles(self, layout: Layout) -> Float[Tensor, "b L T"]:
        count = int(self.p * self.head_dim / 2)
        angles = geometric_angles(layout.positions, count, self.head_dim, self.base)
        return torch.nn.functional.pad(angles, (0, self.head_dim // 2 - count))


ENTRY = Entry(
    factory=PRope,
    summary="RoPE without the slowest frequencies: those pairs are not rotated.",
    relative=True,
    trainable=False,
    extrapolates="Degrades past the training length, later than RoPE.",
    cost="(Q + K)·D·H",
    sharing="layers",
)
