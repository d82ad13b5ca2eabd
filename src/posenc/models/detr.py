"""Absolute positions added to queries and keys in every attention layer (DETR)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from posenc.encoding import EmbeddingEncoding, Encoding, QueryKeyTransform
from posenc.encoding.parts import Projection
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.embedding.fourier import Fourier
from posenc.encodings.embedding.gaussian_fourier import GaussianFourier
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.encodings.embedding.row_column import RowColumn
from posenc.encodings.embedding.sine2d import Sine2d
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout

ADDED = (Fourier, GaussianFourier, Learned2d, RowColumn, Sine2d)
"""Parts that add a vector that depends on the position only."""


class AtAttention(QueryKeyTransform):
    """``q_i + W_Q p_i`` and ``k_j + W_K p_j``, equal to ``W_Q (x_i + p_i)`` in each layer.

    In DETR's encoder this is better than sines at the input (40.6 against 39.2 AP).

    Args:
        embedding: a part that adds a vector p that depends on the position only.

    Raises:
        ArgumentError: for another part; in ``forward``, outside an ``Attention``.

    Reference: Carion et al. 2020, "End-to-End Object Detection with Transformers".
    """

    axes: ClassVar[tuple[int, ...] | None] = (2,)

    def __init__(self, embedding: EmbeddingEncoding) -> None:
        super().__init__()
        if not isinstance(embedding, ADDED):
            raise ArgumentError(
                "positions",
                expected="'input' for this embedding part, which does not just add a vector",
                got=f"'attention' for {type(embedding).__name__}",
                remedy=f"Or use one of {', '.join(kind.__name__ for kind in ADDED)}.",
            )
        self.embedding = embedding
        self._attached: tuple[Projection, Projection] | None = None

    def attach(self, query: Projection, key: Projection) -> None:
        """Refer to the layer's projections."""
        self._attached = (query, key)  # a tuple, to stay out of the state dict

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        if self._attached is None:
            raise ArgumentError(
                "encoding",
                expected="a layer with projections",
                got="none",
                remedy="Use the encoding in posenc.Attention, or call attach(query, key).",
            )
        query, key = self._attached
        return self._added(q, query, grid.query), self._added(k, key, grid.key)

    def _added(self, heads: Tensor, projection: Projection, layout: Layout) -> Tensor:
        nowhere = heads.new_zeros(layout.batch, layout.length, projection.in_features)
        # without the bias, which queries and keys include already
        bias = projection(nowhere[:1, :1])
        projected = projection(self.embedding(nowhere, layout)) - bias
        split = projected.view(*projected.shape[:2], heads.shape[1], heads.shape[3])
        return heads + split.transpose(1, 2)


def at_attention(encoding: Encoding) -> Encoding:
    """The encoding with its embedding part moved into attention; itself if it has none.

    Raises:
        ArgumentError: if the part cannot be moved, or the encoding has a query_key part.
    """
    if encoding.embedding is None:
        return encoding
    if encoding.query_key is not None:
        raise ArgumentError(
            "positions",
            expected="'input' for an encoding with a query_key part",
            got="'attention'",
            remedy="Use positions='input', or one encoding only.",
        )
    return Encoding(
        query_key=AtAttention(encoding.embedding), score=encoding.score, value=encoding.value
    )
