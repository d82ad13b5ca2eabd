"""Rotary positions of images by learned commuting matrices."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Width
from posenc.encoding import Entry
from posenc.encodings.common.matrix_rotation import MatrixRotary
from posenc.errors import ArgumentError


class ComRope(MatrixRotary):
    """ComRoPE: learned rotations of blocks of features that commute and are therefore relative.

    ``q'_i = exp(y_i A_y + x_i A_x) q_i`` and likewise keys, A = B - Bᵀ learned for each head and
    block of b features. ``"linear"`` (ComRoPE-LD): the axes share a block's matrix up to a learned
    factor per axis and block; ``"axial"`` (ComRoPE-AP): blocks alternate between rows and columns.

    ``(y, x)`` is a position in cells, any reals, divided by ``span``. All entries of B and factors
    start standard normal, as in the official code. Rotations take b times the memory of the
    features. Differs from the official code in special tokens: they are not rotated here; there the
    class token is at the centre.

    Args:
        heads: query heads H.
        head_dim: width D of a head.
        variant: ``"linear"`` or ``"axial"``.
        block: b, features per rotated block.
        span: cells per side of the training images.

    Raises:
        ArgumentError: when ``heads`` is below 1, ``block`` is below 2 or does not divide
            ``head_dim`` (into an even number of blocks if axial), or ``span`` is not above 0.
        UnknownNameError: for another ``variant``.

    Reference: Yu et al. 2025, "ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized
    by Trainable Commuting Angle Matrices", https://arxiv.org/abs/2506.03737.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.image(2, 3, prefix=1))
    >>> q = torch.randn(1, 2, 7, 8)
    >>> posenc.create("comrope", heads=2, head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 7, 8])
    """

    variant: Literal["linear", "axial"] = "linear"
    block: Width = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        block, blocks = self.block, self.head_dim // self.block
        if self.variant == "axial" and blocks % 2:
            raise ArgumentError(
                "block",
                expected="an even number of blocks (head_dim / block), half of them per axis",
                got=blocks,
                remedy="Use smaller blocks, or variant='linear'.",
            )
        self.matrix = nn.Parameter(torch.empty(self.heads, blocks, block, block))
        self.factor = nn.Parameter(torch.empty(2, blocks)) if self.variant == "linear" else None

    def reset_parameters(self) -> None:
        """Draw standard normal initial values."""
        nn.init.normal_(self.matrix)
        if self.factor is not None:
            nn.init.normal_(self.factor)

    def generators(self, *, dtype: torch.dtype) -> Float[Tensor, "2 H N b b"]:
        matrix = self.matrix.to(dtype)
        if self.factor is not None:
            factor = self.factor.to(dtype)
        else:
            axis = torch.arange(matrix.shape[1], device=matrix.device) % 2
            factor = torch.stack([axis == 0, axis == 1]).to(dtype)
        return factor[:, None, :, None, None] * matrix


ENTRY = Entry(
    factory=ComRope,
    summary="Rotates blocks of features by exponentials of learned commuting matrices.",
    relative=True,
    trainable=True,
    extrapolates="Holds at resolutions above the trained one better than LieRE, as published.",
    cost="(Q + K)·D·H·b²",
    exceptions={"angles": "matrix exponentials at position p are accurate to |p| · 2^-53"},
)
