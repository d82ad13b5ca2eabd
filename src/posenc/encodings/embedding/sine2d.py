"""Sinusoidal positions of images with padding."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Positive, QuarterWidth
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.checks import require_axes
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.common.table import fuse
from posenc.errors import ArgumentError
from posenc.layout import Layout


class Sine2d(EmbeddingEncoding):
    """DETR's sinusoids: half the features for the row, half for the column, over real cells.

    ``x + [S(y), S(x)]``, ``S(c)[2t] = sin(c · ω_t)``, ``S(c)[2t+1] = cos(c · ω_t)``,
    ``ω_t = temperature^(-4t/C)``; y and x are cumulative sums of the valid mask along columns and
    rows, so that the first real cell is 1.

    With ``scale`` (radians) both are normalised by the real cells of their column or row,
    ``y ← scale · y / (y_last + 1e-6)``, which requires whole images (``Layout.image``). Without it
    any layout of two axes is accepted; y and x are positions + 1 if it is not a whole image.
    Special tokens pass unchanged. With ``scale`` it depends on the image's sides. Differs from the
    paper, which adds them to queries and keys of every layer, in adding them to the tokens once;
    sums are taken in float32 or better.

    Args:
        dim: width C, a multiple of 4.
        temperature: ratio of the fastest frequency to the slowest, in the limit.
        scale: normalised coordinate of the last real cell of a row or column; None: no scaling.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, for a layout that has
            not two axes, or with ``scale`` is not a whole image.

    Reference: Carion et al. 2020, "End-to-End Object Detection with Transformers",
    https://arxiv.org/abs/2005.12872.

    >>> import posenc, torch
    >>> encoding = posenc.create("sine2d", dim=4, scale=None)
    >>> x = encoding.embed(torch.zeros(1, 2, 4), posenc.Layout.image(1, 2))
    >>> [[round(value, 2) for value in cell] for cell in x[0].tolist()]
    [[0.84, 0.54, 0.84, 0.54], [0.84, 0.54, 0.91, -0.42]]
    """

    axes = (2,)
    pairwise = False

    EPSILON = 1e-6

    dim: QuarterWidth
    temperature: Base = 10000.0
    scale: Positive | None = 2 * math.pi

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        return fuse(x, zero_special(self.features(self.coordinates(layout)), layout), "add")

    def coordinates(self, layout: Layout) -> Float[Tensor, "b L 2"]:
        """y and x of every token, ``[B|1, L, 2]``; arbitrary at special tokens."""
        require_axes(layout, 2, remedy="Use Layout.image, or sinusoidal for text.")
        if layout.extent is None:
            if self.scale is not None:
                raise ArgumentError(
                    "layout",
                    expected="a whole image (Layout.image), as scale requires",
                    got="single cells",
                    remedy="Create the encoding with scale=None to count cells.",
                )
            return layout.positions + 1
        height, width = layout.extent
        prefix = layout.length - height * width
        if layout.valid is None:
            ones = layout.positions.new_ones(1, height, width)
        else:
            mask = layout.valid[:, prefix:].to(layout.positions.dtype)
            ones = mask.reshape(mask.shape[0], height, width)
        y, x = ones.cumsum(1), ones.cumsum(2)
        if self.scale is not None:
            y = y / (y[:, -1:] + self.EPSILON) * self.scale
            x = x / (x[:, :, -1:] + self.EPSILON) * self.scale
        cells = torch.stack([y, x], dim=-1).flatten(1, 2)
        return torch.nn.functional.pad(cells, (0, 0, prefix, 0))

    def features(self, coordinates: Float[Tensor, "*dims 2"]) -> Float[Tensor, "*dims C"]:
        """Sines and cosines of y, then of x, in the coordinates' dtype."""
        half = self.dim // 2
        angles = geometric_angles(coordinates.unsqueeze(-1), half // 2, half, self.temperature)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


ENTRY = Entry(
    factory=Sine2d,
    summary="Adds sines of an image cell's row and column, counted over real cells.",
    relative=False,
    trainable=False,
    length_dependent=True,
    extrapolates="To images of any size when scaled: the last cell is always 2π.",
    cost="L·C once",
    sample={"scale": None},
    sharing="layers",
)
