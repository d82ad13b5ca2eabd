"""A trained vector per row and per column of an image."""

from __future__ import annotations

import torch
from torch import nn

from posenc.arguments import Count, EvenWidth
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.common.table import fuse, read_rows
from posenc.encodings.embedding.learned2d import require_grid
from posenc.layout import Layout


class RowColumn(EmbeddingEncoding):
    """DETR's learned positions: half the features from a column table, half from a row table.

    ``x + [X[x], Y[y]]`` for the cell in row y and column x; ``Y`` is ``[height, C/2]`` and ``X``
    ``[width, C/2]``. Note the order: columns first.

    Positions in cells from 0; fractional ones are interpolated linearly; special tokens pass
    unchanged. Positions past the tables raise. Differs from DETR, which adds them to queries and
    keys of every layer, in adding them to the tokens once.

    Args:
        dim: width C, even.
        size: (height, width) in cells, the rows of ``Y`` and of ``X``.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, for a layout that has
            not two axes.
        LengthError: in ``forward``, for a cell outside the tables.

    Reference: Carion et al. 2020, "End-to-End Object Detection with Transformers",
    https://arxiv.org/abs/2005.12872.

    >>> import posenc, torch
    >>> encoding = posenc.create("row_column", dim=4)
    >>> cells = encoding.embed(torch.zeros(1, 6, 4), posenc.Layout.image(2, 3))[0]
    >>> bool((cells[0, 2:] == cells[1, 2:]).all()), bool((cells[0, :2] == cells[3, :2]).all())
    (True, True)
    """

    axes = (2,)

    dim: EvenWidth
    size: tuple[Count, Count] = (50, 50)

    def __post_init__(self) -> None:
        rows, columns = (torch.empty(side, self.dim // 2) for side in self.size)
        self.rows, self.columns = nn.Parameter(rows), nn.Parameter(columns)

    def reset_parameters(self) -> None:
        """Draw the initial values: uniform in [0, 1), as DETR's."""
        nn.init.uniform_(self.rows)
        nn.init.uniform_(self.columns)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        require_grid(layout, self.size, holder="the learned tables")
        vectors = torch.cat([read_rows(self.columns, layout, 1), read_rows(self.rows, layout)], -1)
        return fuse(x, zero_special(vectors, layout), "add")


ENTRY = Entry(
    factory=RowColumn,
    summary="Adds a trained vector for a cell's column concatenated with one for its row.",
    relative=False,
    trainable=True,
    extrapolates="Not at all: positions past the tables raise.",
    cost="L·C once",
    exceptions={"positions": "only the rows and columns of the tables exist"},
    sample={"size": (64, 48)},
    sharing="layers",
)
