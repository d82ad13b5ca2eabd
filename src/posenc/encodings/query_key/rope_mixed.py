"""Rotary positions on two axes with learned mixed frequencies."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Count, QuarterWidth
from posenc.encoding import Entry, Pairing
from posenc.encodings.common.precision import angles_at, geometric_frequencies
from posenc.encodings.common.rotation import Rotary
from posenc.layout import Layout


class RopeMixed(Rotary):
    """RoPE-Mixed: a learned frequency vector across the image for each pair and head.

    ``angle_ht = y · θ^y_ht + x · θ^x_ht``, by which pair t of head h is rotated.

    ``(y, x)`` is a position in cells, any reals; θ ``[2, H, D/2]`` in radians per cell, learned.
    Initially, as in the paper's code, the first D/4 pairs have magnitudes ``base^(-4t/D)``, t = 0 …
    D/4 - 1, in a random direction per head, the others the same magnitudes at a right angle to it.
    Special tokens are not rotated. Grouped keys are repeated to one per query head, since rotations
    differ by head. Differs from the paper's code in the order of features only.

    Args:
        heads: query heads H.
        head_dim: width D of a head.
        base: sets the smallest initial frequency.
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is no multiple of 4, ``heads`` is below 1 or ``base`` is
            not above 1.
        UnknownNameError: for another ``pairing``.

    Reference: Heo et al. 2024, "Rotary Position Embedding for Vision Transformer",
    https://arxiv.org/abs/2403.13298.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.image(2, 3, prefix=1))
    >>> q = torch.randn(1, 2, 7, 8)
    >>> posenc.create("rope_mixed", heads=2, head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 7, 8])
    """

    axes = (2,)

    heads: Count
    head_dim: QuarterWidth
    base: Base = 10.0
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        self.frequencies = nn.Parameter(torch.empty(2, self.heads, self.head_dim // 2))

    def reset_parameters(self) -> None:
        """Draw a random direction per head, and use it and its perpendicular."""
        with torch.no_grad():
            like = self.frequencies
            pairs, width = self.head_dim // 4, self.head_dim / 2
            size = geometric_frequencies(pairs, width, self.base, like=like)
            direction = 2 * math.pi * torch.rand_like(like[0, :, :1])
            directions = torch.stack([direction, direction + math.pi / 2])
            for axis, component in enumerate((directions.sin(), directions.cos())):
                self.frequencies[axis] = torch.cat(list(component * size), dim=-1)

    def angles(self, layout: Layout) -> Float[Tensor, "b H L T"]:
        positions = layout.positions[:, None, :, :, None]
        rows, columns = self.frequencies.unsqueeze(2)
        return angles_at(positions[..., 0, :], rows) + angles_at(positions[..., 1, :], columns)


ENTRY = Entry(
    factory=RopeMixed,
    summary="Rotates each pair of each head by a learned mix of row and column.",
    relative=True,
    trainable=True,
    extrapolates="Holds at resolutions above the trained one better than axial RoPE.",
    cost="(Q + K)·D·H",
)
