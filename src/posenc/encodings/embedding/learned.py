"""A trained vector per position."""

from __future__ import annotations

import torch
from torch import nn

from posenc.arguments import Length, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.table import Fusion, draw_rows, fuse, read_rows, require_inside
from posenc.layout import Layout


class Learned(EmbeddingEncoding):
    """Learned absolute positions: a trained vector for each position.

    ``x + P[p]`` (or ``x · P[p]``), p = 0 … max_length - 1 in tokens; ``P`` is ``[max_length, C]``.
    Fractional positions are interpolated linearly.

    Positions past the table raise: clamping would silently give many tokens one position. Differs
    from BERT in nothing (truncated normal initial values, standard deviation 0.02); with
    ``fusion="multiply"`` initial values are around 1.

    Args:
        dim: width C.
        max_length: positions in the table.
        fusion: ``"add"`` to the token vectors or ``"multiply"`` them.

    Raises:
        ArgumentError: when ``dim`` or ``max_length`` is out of its domain.
        LengthError: in ``forward``, for a token outside the table.

    Reference: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning",
    https://arxiv.org/abs/1705.03122; Devlin et al. 2019, "BERT".

    >>> import posenc, torch
    >>> encoding = posenc.create("learned", dim=4, max_length=8)
    >>> encoding.embed(torch.zeros(1, 8, 4), posenc.Layout.sequence(8)).shape
    torch.Size([1, 8, 4])
    """

    dim: Width
    max_length: Length
    fusion: Fusion = "add"

    def __post_init__(self) -> None:
        self.table = nn.Parameter(torch.empty(self.max_length, self.dim))

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        draw_rows(self.table, mean=1.0 if self.fusion == "multiply" else 0.0)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        require_inside(
            layout,
            self.max_length,
            "the learned table",
            remedy="Extend the table first (posenc.extension: interpolate, hierarchical, "
            "random_tail), or create it with a larger max_length.",
        )
        return fuse(x, read_rows(self.table, layout), self.fusion)


ENTRY = Entry(
    factory=Learned,
    summary="Adds a trained vector for each position to the token vectors.",
    relative=False,
    trainable=True,
    extrapolates="Not at all: positions past the table raise.",
    cost="L·C once",
    exceptions={"positions": "only 0 … max_length - 1 exist"},
    sharing="layers",
)
