"""Learned Fourier features of real positions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, EvenWidth, Positive, Width, checked
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.checks import require_axes
from posenc.encodings.common.precision import WideLinear, angles_at
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.common.table import fuse
from posenc.layout import Layout


class Fourier(EmbeddingEncoding):
    """Learned Fourier features: sines and cosines over all axes, mixed by a small MLP.

    ``x + W_2 · gelu(W_1 r + b_1) + b_2``, ``r = F^(-1/2) [cos(W_r p), sin(W_r p)]``.

    ``p`` is the position ``[A]`` in tokens or cells, any real; ``W_r`` ``[F/2, A]`` in radians per
    token, trained, initially normal with standard deviation 1/γ, so that ``r(p)·r(p')`` is near
    ``exp(-|p - p'|² / 2γ²) / 2`` in every direction. Special tokens pass unchanged. Differs from
    the paper in having one group of axes; the paper tunes γ and F.

    Args:
        dim: width C.
        axes: A, components of a position.
        features: F, even; C, rounded up to even, by default.
        hidden: width of the hidden layer.
        gamma: γ in tokens, positive.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, for a layout with
            another number of axes.

    Reference: Li et al. 2021, "Learnable Fourier Features for Multi-Dimensional Spatial Positional
    Encoding", https://arxiv.org/abs/2106.02795.

    >>> import posenc, torch
    >>> encoding = posenc.create("fourier", dim=8, axes=3)
    >>> moments = posenc.Layout.at(torch.rand(1, 5, 3))
    >>> encoding.embed(torch.zeros(1, 5, 8), moments).shape
    torch.Size([1, 5, 8])
    """

    axes = None

    @checked
    def __init__(
        self,
        *,
        dim: Width,
        axes: Count = 1,
        features: EvenWidth | None = None,
        hidden: Width = 32,
        gamma: Positive = 10.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        features = dim + dim % 2 if features is None else features
        self.gamma = gamma
        self.frequencies = nn.Parameter(torch.empty(features // 2, axes))
        self.input, self.output = WideLinear(features, hidden), WideLinear(hidden, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.frequencies, std=1 / self.gamma)
        self.input.reset_parameters()
        self.output.reset_parameters()

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        features = waves(layout, self.frequencies)
        features = features * features.shape[-1] ** -0.5
        vectors = self.output(nn.functional.gelu(self.input(features)))
        return fuse(x, zero_special(vectors, layout), "add")


def waves(layout: Layout, frequencies: Float[Tensor, "T A"]) -> Float[Tensor, "b L F"]:
    """``[cos(W p), sin(W p)]`` of a layout's positions, ``[B|1, L, 2T]``, in their dtype.

    Raises:
        ArgumentError: when positions have another number of axes than ``frequencies``.
    """
    axes = frequencies.shape[1]
    require_axes(layout, axes, remedy=f"Create the encoding with axes={layout.axes}.")
    # Not a matrix product: autocast would run it in bfloat16, where positions collide.
    angles = angles_at(layout.positions.unsqueeze(-2), frequencies).sum(-1)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


ENTRY = Entry(
    factory=Fourier,
    summary="Adds learned sines and cosines over all position axes, mixed by a small MLP.",
    relative=False,
    trainable=True,
    extrapolates="Poorly past the training length: phases differ from those of training.",
    cost="L·(C + features)·hidden once",
    sharing="layers",
)
