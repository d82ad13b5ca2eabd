"""Rotary positions of images by exponentials of learned matrices."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Width
from posenc.encoding import Entry
from posenc.encodings.common.matrix_rotation import MatrixRotary


class LieRope(MatrixRotary):
    """LieRE: rotations of blocks of features by exponentials of learned skew-symmetric matrices.

    ``q'_i = exp(y_i A_y + x_i A_x) q_i`` and likewise keys; A_y and A_x are skew-symmetric,
    learned, one of each per block of b features, head and layer.

    ``(y, x)`` is a position in cells, any reals, divided by ``span``. The entries above A's
    diagonal start uniform in 0 … 2π radians, as in the official code. Special tokens are not
    rotated. It is relative only where A_y and A_x commute (always for b = 2, which is RoPE-Mixed).
    Rotations take b times the memory of the features. Differs from the paper in nothing.

    Args:
        heads: query heads H.
        head_dim: width D of a head.
        block: b; 8 or the whole head in the paper.
        span: cells per side of the training images.

    Raises:
        ArgumentError: when ``heads`` is below 1, ``block`` is below 2 or does not divide
            ``head_dim``, or ``span`` is not above 0.

    Reference: Ostmeier et al. 2024, "LieRE: Lie Rotational Positional Encodings",
    https://arxiv.org/abs/2406.10322.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.image(2, 3, prefix=1))
    >>> q = torch.randn(1, 2, 7, 8)
    >>> posenc.create("lierope", heads=2, head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 7, 8])
    """

    block: Width = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        block, blocks = self.block, self.head_dim // self.block
        self.upper = nn.Parameter(torch.empty(2, self.heads, blocks, block * (block - 1) // 2))

    def reset_parameters(self) -> None:
        """Draw initial values uniformly from 0 … 2π."""
        nn.init.uniform_(self.upper, 0.0, 2 * math.pi)

    def generators(self, *, dtype: torch.dtype) -> Float[Tensor, "2 H N b b"]:
        row, column = torch.triu_indices(self.block, self.block, 1, device=self.upper.device)
        zeros = self.upper.new_zeros(*self.upper.shape[:3], self.block, self.block, dtype=dtype)
        index = (row * self.block + column).expand_as(self.upper)
        return zeros.flatten(-2).scatter(-1, index, self.upper.to(dtype)).view_as(zeros)


ENTRY = Entry(
    factory=LieRope,
    summary="Rotates blocks of features by exponentials of learned matrices, one per axis.",
    relative=False,
    trainable=True,
    extrapolates="Degrades at resolutions above the trained one.",
    cost="(Q + K)·D·H·b²",
)
