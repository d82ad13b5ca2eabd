"""Swin's relative position biases."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count
from posenc.encoding import BucketedTerms, Entry, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores, StructuredTerms
from posenc.encodings.common.special_tokens import has_special, zero_special_pairs
from posenc.encodings.common.window import Window
from posenc.grid import Grid


class Swin(ScoreTerm):
    """Swin bias: a learned number for each head and each offset inside a window of an image.

    ``s_ij += table[h, n]``, ``n = (Δ'_y + M_y - 1) · (2M_x - 1) + Δ'_x + M_x - 1``.

    Δ' = (row, column) of query i less that of key j, in cells (a fractional one is rounded); window
    ``M_y`` by ``M_x`` cells; table ``[H, (2M_y - 1)(2M_x - 1)]`` in logits. Tokens of a window have
    the same ``Layout.document``; in shifted windows, cells from opposite edges of the image have
    different ones. Pairs with a special token (a class token) have no offset and no bias. Differs
    from the paper in nothing.

    Args:
        heads: H.
        window: (M_y, M_x) in cells. A visible pair farther apart is refused with a LengthError
            where that is known without waiting for a device, and has NaN for a logit elsewhere.

    Raises:
        ArgumentError: when ``heads`` or a side of ``window`` is below 1.

    Reference: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted
    Windows", https://arxiv.org/abs/2103.14030.

    >>> import posenc, torch
    >>> swin = posenc.create("swin", heads=4, window=(2, 3)).score
    >>> swin.offsets.index(torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, 0.0]])).tolist()
    [7, 0, 12]
    """

    axes = (2,)
    by_position = True

    heads: Count
    window: tuple[Count, Count] = (7, 7)

    def __post_init__(self) -> None:
        self.offsets = Window(*self.window)
        self.table = nn.Parameter(torch.empty(self.heads, self.offsets.count))

    def reset_parameters(self) -> None:
        """Draw initial values, normal with standard deviation 0.02, as the authors' code does."""
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        bias = self._guarded(grid)[:, self.offsets.index(grid.offset)]
        return zero_special_pairs(bias.transpose(0, 1), grid)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        if has_special(grid):
            return None
        return (BucketedTerms(self.offsets.index, table=self._guarded(grid)),)

    def _guarded(self, grid: Grid) -> Float[Tensor, "H N+1"]:
        """The table, and a last entry for pairs outside the window.

        Where all visible pairs are known to be inside, only hidden ones read it.
        """
        outside = 0.0 if self.offsets.require(grid) else float("nan")
        return nn.functional.pad(self.table, (0, 1), value=outside)


ENTRY = Entry(
    factory=Swin,
    summary="Adds a learned number for each head and offset inside a window of an image.",
    relative=True,
    trainable=True,
    extrapolates="Not at all: a larger window needs the table resampled (posenc.extension).",
    cost="Q·K·H; a table of H·(2M - 1)² numbers",
    sample={"window": (14, 14)},
)
