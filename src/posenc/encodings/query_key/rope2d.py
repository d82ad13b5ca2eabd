"""Rotary positions on two axes, half of each head's pairs per axis."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, QuarterWidth
from posenc.encoding import Entry, Pairing
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.rotation import Rotary
from posenc.layout import Layout


class Rope2d(Rotary):
    """Axial RoPE: rotates the first half of a head's pairs by the row, the second by the column.

    Pair t is rotated by ``y · θ_t`` and pair D/4 + t by ``x · θ_t``, ``θ_t = base^(-4t/D)``,
    t = 0 … D/4 - 1: RoPE with D/2 features per axis.

    ``(y, x)`` is a position in cells, any reals; ``θ_t`` in radians per cell. Special tokens are
    not rotated. Differs from the paper's code in the order of features only (there columns first
    and adjacent pairs). Qwen2-VL's image encoder is ``base=10000``; DINOv3 is ``base=100`` with
    positions centred, scaled to [-1, 1] and multiplied by 2π.

    Args:
        head_dim: width D of a head.
        base: sets the slowest frequency; smaller for images than for text.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is no multiple of 4, or ``base`` is not above 1.
        UnknownNameError: for another ``pairing``.

    Reference: Heo et al. 2024, "Rotary Position Embedding for Vision Transformer",
    https://arxiv.org/abs/2403.13298.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.image(2, 3, prefix=1))
    >>> q = torch.randn(1, 2, 7, 8)
    >>> posenc.create("rope2d", head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 7, 8])
    """

    axes = (2,)

    head_dim: QuarterWidth
    base: Base = 100.0
    pairing: Pairing = "half"

    def angles(self, layout: Layout) -> Float[Tensor, "b L T"]:
        positions, width = layout.positions.unsqueeze(-1), self.head_dim / 2
        return geometric_angles(positions, self.head_dim // 4, width, self.base).flatten(-2)


ENTRY = Entry(
    factory=Rope2d,
    summary="Rotates half of the pairs by angles proportional to the row, half to the column.",
    relative=True,
    trainable=False,
    extrapolates="Holds at resolutions somewhat above the trained one, then degrades.",
    cost="(Q + K)·D·H",
    sharing="layers",
)
