"""A trained table of n positions that covers n²."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Length, Share, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.table import draw_rows, fuse, read_rows, require_inside
from posenc.errors import ArgumentError
from posenc.layout import Layout

PAPER_ALPHA = 0.4


class Hierarchical(EmbeddingEncoding):
    """Hierarchical positions: a trained table of n rows decomposed into n² positions.

    ``q_{(i-1)n + j} = α u_i + (1 - α) u_j``, ``u_i = (p_i - α p_1) / (1 - α)``,
    i, j = 1 … n; the output is ``x + q``.

    ``p`` ``[n, C]`` is the trained table, ``q`` ``[n², C]`` the vectors of positions 0 … n² - 1 in
    tokens, fractional ones interpolated. The first n rows of q equal p, so positions up to n are
    unchanged. Differs from the source in nothing.

    Args:
        dim: width C.
        max_length: n, the training length.
        alpha: α, weight of the coarse part, 0 < α < 1; not 0.5, for which (i, j) and (j, i) have
            equal vectors.

    Raises:
        ArgumentError: when an option is out of its domain.
        LengthError: in ``forward``, for a token at n² or beyond.

    Reference: Su 2020, "Hierarchical decomposition of position encodings: BERT can handle
    ultra-long texts", https://kexue.fm/archives/7947.

    >>> import posenc, torch
    >>> encoding = posenc.create("hierarchical", dim=4, max_length=8)
    >>> encoding.embed(torch.zeros(1, 64, 4), posenc.Layout.sequence(64)).shape
    torch.Size([1, 64, 4])
    """

    dim: Width
    max_length: Length
    alpha: Share = PAPER_ALPHA

    def __post_init__(self) -> None:
        require_alpha(self.alpha)
        self.table = nn.Parameter(torch.empty(self.max_length, self.dim))

    def reset_parameters(self) -> None:
        """Draw the initial values, as for a learned table."""
        draw_rows(self.table)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        count = self.max_length
        require_inside(layout, count**2, f"a hierarchical table of {count} rows")
        trained = layout.start is not None and layout.start + layout.length <= count
        rows = self.table if trained else hierarchical_rows(self.table, self.alpha)
        return fuse(x, read_rows(rows, layout), "add")


def require_alpha(alpha: float) -> None:
    """ArgumentError unless the decomposition exists for ``alpha``."""
    if not 0 < alpha < 1 or alpha == 0.5:
        raise ArgumentError(
            "alpha", expected="0 < α < 1, not 0.5", got=alpha, remedy="0.4 is the source's."
        )


def hierarchical_rows(
    table: Float[Tensor, "N C"], alpha: float, *, blocks: int | None = None
) -> Float[Tensor, "M C"]:
    """The n² rows of a decomposed table of n, ``[n², C]``, or the first n · ``blocks``."""
    base = (table - alpha * table[:1]) / (1 - alpha)
    coarse = base[: len(base) if blocks is None else blocks]
    return (alpha * coarse.unsqueeze(1) + (1 - alpha) * base.unsqueeze(0)).flatten(0, 1)


ENTRY = Entry(
    factory=Hierarchical,
    summary="Decomposes a trained table of n positions into n².",
    relative=False,
    trainable=True,
    extrapolates="To the square of its trained length; past that it raises.",
    cost="L·C once; n²·C rows past n",
    exceptions={"positions": "only 0 … max_length² - 1 exist"},
    sharing="layers",
)
