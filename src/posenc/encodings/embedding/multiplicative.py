"""Multiplicative positions with a trained gain per position."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Fraction, Length, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.precision import at_least_single
from posenc.encodings.common.table import fuse, read_rows, require_inside
from posenc.layout import Layout


class Multiplicative(EmbeddingEncoding):
    """Multiplicative positions: each feature of a token is scaled by a trained gain.

    ``x ⊗ g[p]``, ``g = 1 + b · tanh(w / b)`` (or ``1 + w`` without a bound).

    ``p`` = 0 … max_length - 1 in tokens, fractional ones interpolated; ``w`` ``[max_length, C]``
    trained, initially zero (the identity); gains are bounded to (1 - b, 1 + b). Differs from the
    source in the bound; ``bound=None`` removes it.

    Args:
        dim: width C.
        max_length: positions in the table.
        bound: b, largest difference of a gain from 1; None for no bound.

    Raises:
        ArgumentError: when ``dim``, ``max_length`` or ``bound`` is out of its domain.
        LengthError: in ``forward``, for a token outside the table.

    Reference: Su 2021, "Transformer position encodings that rack researchers' brains",
    https://kexue.fm/archives/8130, section on multiplicative positions.

    >>> import posenc, torch
    >>> encoding = posenc.create("multiplicative", dim=4, max_length=8)
    >>> encoding.embed(torch.ones(1, 2, 4), posenc.Layout.sequence(2))[0, 1].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    dim: Width
    max_length: Length
    bound: Fraction | None = 1.0

    def __post_init__(self) -> None:
        self.table = nn.Parameter(torch.empty(self.max_length, self.dim))

    def reset_parameters(self) -> None:
        """Set gains to 1."""
        nn.init.zeros_(self.table)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        require_inside(layout, len(self.table), "the table of gains")
        weights = at_least_single(read_rows(self.table, layout))
        return fuse(x, bounded_gain(weights, self.bound), "multiply")


def bounded_gain(weights: Float[Tensor, "*dims"], bound: float | None) -> Float[Tensor, "*dims"]:
    """``1 + bound · tanh(weights / bound)``; ``1 + weights`` without a bound."""
    return 1 + (weights if bound is None else bound * torch.tanh(weights / bound))


ENTRY = Entry(
    factory=Multiplicative,
    summary="Scales each feature of a token by a bounded, trained gain of its position.",
    relative=False,
    trainable=True,
    extrapolates="Not at all: positions past the table raise.",
    cost="L·C once",
    exceptions={"positions": "only 0 … max_length - 1 exist"},
    sharing="layers",
)
