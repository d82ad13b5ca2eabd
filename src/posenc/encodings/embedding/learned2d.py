"""A trained vector per cell of an image."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.arguments import Count, Natural, Width, checked
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.checks import require_axes
from posenc.encodings.common.precision import at_least_single, with_zero_gradient
from posenc.encodings.common.table import STD, fuse, neighbours, real_positions, require_inside
from posenc.errors import LengthError
from posenc.layout import Layout
from posenc.runtime import has_values

REMEDY = "Extend the table first (posenc.extension: interpolate), or create it with a larger size."


class Learned2d(EmbeddingEncoding):
    """Learned positions of an image: a trained vector for each cell.

    ``x + P[y, x]`` for the cell in row y and column x, ``x + S[n]`` for the n-th special token of
    a row of the batch (a class token); ``P`` is ``[height, width, C]``, ``S`` ``[special, C]``.

    Positions in cells from 0; fractional ones are interpolated bilinearly. Positions past the table
    raise. Differs from ViT in nothing (normal initial values, standard deviation 0.02); ViT stores
    S and P in one table, S first.

    Args:
        dim: width C.
        size: (height, width) of the table in cells.
        special: rows for special tokens; a layout may have fewer.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, for a layout that has
            not two axes.
        LengthError: in ``forward``, for a cell outside the table or too many special tokens.

    Reference: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words: Transformers for Image
    Recognition at Scale", https://arxiv.org/abs/2010.11929.

    >>> import posenc, torch
    >>> encoding = posenc.create("learned2d", dim=4, size=(3, 5))
    >>> encoding.embed(torch.zeros(1, 16, 4), posenc.Layout.image(3, 5, prefix=1)).shape
    torch.Size([1, 16, 4])
    """

    axes = (2,)

    @checked
    def __init__(
        self, *, dim: Width, size: tuple[Count, Count] = (14, 14), special: Natural = 1
    ) -> None:
        super().__init__()
        self.dim = dim
        self.table = nn.Parameter(torch.empty(*size, dim))
        self.special = nn.Parameter(torch.empty(special, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.table, std=STD)
        nn.init.normal_(self.special, std=STD)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        height, width, _ = self.table.shape
        require_grid(layout, (height, width), holder="the learned table")
        vectors = self._cells(layout)
        if layout.special is None:
            vectors = with_zero_gradient(vectors, self.special)
        else:
            special = layout.special.unsqueeze(-1)
            vectors = torch.where(special, self._special(layout.special), vectors)
        return fuse(x, vectors, "add")

    def _cells(self, layout: Layout) -> Float[Tensor, "b L C"]:
        table = at_least_single(self.table)
        if layout.extent is not None and layout.valid is None:
            height, width = layout.extent
            cells = table[:height, :width].flatten(0, 1).unsqueeze(0)
            return nn.functional.pad(cells, (0, 0, layout.length - height * width, 0))
        rows, columns = (
            neighbours(real_positions(layout, axis), count)
            for axis, count in enumerate(table.shape[:2])
        )
        right, down = columns[2].unsqueeze(-1), rows[2].unsqueeze(-1)
        above, below = (
            torch.lerp(table[row, columns[0]].to(right), table[row, columns[1]].to(right), right)
            for row in rows[:2]
        )
        return torch.lerp(above, below, down)

    def _special(self, special: Bool[Tensor, "b L"]) -> Float[Tensor, "b L C"]:
        """The row of each special token; arbitrary at other tokens."""
        count = self.special.shape[0]
        number = special.cumsum(1) - 1
        if has_values(number):
            needed = int(number[:, -1].max()) + 1
            if needed > count:
                raise LengthError(
                    "special",
                    expected=f"up to {count} special tokens",
                    got=needed,
                    remedy=f"Create the encoding with special={needed}.",
                )
        table = self.special if count else self.table.new_zeros(1, self.table.shape[-1])
        return table[number.clamp(0, max(count - 1, 0))]


def require_grid(layout: Layout, size: tuple[int, int], *, holder: str) -> None:
    """Check that a layout has two axes and all its real cells are inside a table.

    Raises:
        ArgumentError: for another number of axes.
        LengthError: for a cell outside, naming ``holder``.
    """
    require_axes(layout, 2, remedy="Use Layout.image, or learned for text.")
    for axis, side in enumerate(("rows", "columns")):
        require_inside(layout, size[axis], f"{holder} ({side})", remedy=REMEDY, axis=axis)


ENTRY = Entry(
    factory=Learned2d,
    summary="Adds a trained vector for each cell of an image to the token vectors.",
    relative=False,
    trainable=True,
    extrapolates="Not at all: positions past the table raise.",
    cost="L·C once",
    exceptions={"positions": "only the cells of the table exist"},
    sample={"size": (64, 48)},
    sharing="layers",
)
