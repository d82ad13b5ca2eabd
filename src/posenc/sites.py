"""The four places where position enters a Transformer, as abstract parts of an encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.lowered import Gathered, Lowered, Pairing, Rotation
from posenc.part import Part

__all__ = ["EmbeddingEncoding", "QueryKeyTransform", "ScoreTerm", "ValueTerm"]


class EmbeddingEncoding(Part, ABC):
    """Changes the token vectors before the first block, or before each."""

    every_layer: ClassVar[bool] = False
    """Whether it enters every block (FLOATER) rather than the first only."""

    lookback: int = 0
    """How many tokens before the given ones it reads (a causal convolution does)."""

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "B L C"],
        layout: Layout,
        *,
        tokens: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L C"]:
        """Token vectors ``[B, L, C]`` with position in them, in ``x``'s dtype.

        ``tokens``: their ids, for methods that keep tables a word.
        """


class QueryKeyTransform(Part, ABC):
    """Transforms queries and keys before their product."""

    scale: ClassVar[float | None] = None
    """Required softmax scale; None uses the default."""

    tokenwise: ClassVar[bool] = True
    """True if transformed keys can be cached: each depends on the key and its position alone.
    xPos counts from the middle of a call's queries, so its keys are transformed at every call."""

    views: ClassVar[int] = 1
    """How many heads in a row get the same query, each to look at it in its own way. RoPE++ has a
    real and an imaginary head of each; a layer then projects half as many queries as heads."""

    widening: ClassVar[int] = 1
    """Width of transformed queries and keys, as a multiple of the head's."""

    @abstractmethod
    def forward(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"], grid: Grid
    ) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B G K E"]]:
        """Both transformed, in their own dtypes, with as many heads as they came with.

        Where each query head treats its keys in its own way, the keys come back with H heads.
        """

    def lower(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"], grid: Grid
    ) -> Rotation | None:
        """The same as factors of pairs, if it is just that; a kernel can then do it by itself.

        None where there is no such form, or where keys would come back with more heads.
        """
        return None

    def rotation(
        self, layout: Layout
    ) -> tuple[Float[Tensor, "b h L T"], Float[Tensor, "b h L T"], Pairing] | None:
        """Cosines and sines, each ``[B|1, H|1, L, T]``, and the pairing; None where it does more.

        Both are the same for queries and keys, and a gain is in both.
        """
        return None


class ScoreTerm(Part, ABC):
    """Adds to the attention logits, or replaces them."""

    terms: ClassVar[int] = 1
    """Summands of the logit; the default scale is ``(terms · D) ** -0.5``."""

    replaces_product: ClassVar[bool] = False
    """Whether ``forward`` returns the whole logit rather than a summand beside ``scale · q·k``."""

    replaces_softmax: ClassVar[bool] = False
    """Whether what ``forward`` returns are logarithms of the weights, which no softmax follows.

    Only where it replaces the product too; weights then need not sum to 1.
    """

    by_position: ClassVar[bool] = False
    """Whether ``forward`` reads positions alone, never queries, keys or signals."""

    keys_by_keys: ClassVar[bool] = False
    """Whether ``forward`` makes matrices of K×K, however few the queries are."""

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B H K D"],
        grid: Grid,
        *,
        scale: float,
    ) -> Float[Tensor, "b H Q K"]:
        """The summand ``[B|1, H, Q, K]`` (the whole logit if ``replaces_product``).

        The definition as in the paper; may take memory of size Q×K. Keys come with H heads.
        """

    def lower(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B H K D"],
        grid: Grid,
        *,
        scale: float,
    ) -> tuple[Lowered, ...] | None:
        """The same in the structured form that fast backends use; None where there is none."""
        return None


class ValueTerm(Part, ABC):
    """Adds to the weighted sum of values."""

    @abstractmethod
    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        """The summand ``[B, H, Q, D]`` of the output, from the attention weights."""

    def lower(self, grid: Grid) -> Gathered | None:
        """The same as ``Gathered(value=...)``; None where there is no such form."""
        return None
