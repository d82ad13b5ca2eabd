"""Random Fourier features of real positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posenc.arguments import Count, EvenWidth, Length, Positive, checked
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.precision import wider
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.common.table import fuse
from posenc.encodings.embedding.fourier import waves
from posenc.layout import Layout


class GaussianFourier(EmbeddingEncoding):
    """Gaussian Fourier features: sines and cosines over all axes with fixed random frequencies.

    ``x + [cos(2π B p), sin(2π B p)]``, ``B ~ N(0, (σ/span)²)``, ``B`` is ``[C/2, A]``.

    ``p`` is the position ``[A]`` in tokens or cells, any real; p/span is the paper's coordinate in
    [0, 1). The product of two positions' vectors is near ``C/2 · exp(-2π² σ² |p - p'|² / span²)``
    in every direction. B is drawn from torch's generator, saved with the model, and not trained.
    Special tokens pass unchanged. Differs from the paper in adding the features to token vectors
    rather than feeding them to a network alone; the paper tunes σ.

    Args:
        dim: width C, even.
        max_length: span, in tokens on each axis.
        axes: A, components of a position.
        sigma: σ, in cycles per span; positive.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, for a layout with
            another number of axes.

    Reference: Tancik et al. 2020, "Fourier Features Let Networks Learn High Frequency Functions in
    Low Dimensional Domains", https://arxiv.org/abs/2006.10739.

    >>> import posenc, torch
    >>> encoding = posenc.create("gaussian_fourier", dim=8, max_length=100)
    >>> vectors = encoding.embed(torch.zeros(1, 5, 8), posenc.Layout.sequence(5))
    >>> [round(norm, 3) for norm in vectors.square().sum(-1)[0].tolist()]
    [4.0, 4.0, 4.0, 4.0, 4.0]
    """

    axes = None
    drawn: Tensor

    @checked
    def __init__(
        self, *, dim: EvenWidth, max_length: Length = 512, axes: Count = 1, sigma: Positive = 10.0
    ) -> None:
        super().__init__()
        self.dim = dim
        self.sigma, self.span = sigma, max_length
        # Stored as the bits of float32 numbers: a float buffer would be cast with the module.
        self.register_buffer("drawn", torch.empty(dim // 2, axes, dtype=torch.int32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the frequencies."""
        numbers = torch.randn(self.drawn.shape, device=self.drawn.device, dtype=torch.float32)
        self.drawn.copy_(numbers.view(torch.int32))

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        scale = 2 * math.pi * self.sigma / self.span
        vectors = waves(layout, scale * wider(self.drawn.view(torch.float32)))
        return fuse(x, zero_special(vectors, layout), "add")


ENTRY = Entry(
    factory=GaussianFourier,
    summary="Adds sines and cosines over all position axes with fixed random frequencies.",
    relative=False,
    trainable=False,
    extrapolates="Poorly past the training length, as sinusoids do.",
    cost="L·C·A once",
    sharing="layers",
)
