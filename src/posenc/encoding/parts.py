"""The abstract parts of an encoding, one for each place where position enters a Transformer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Protocol

from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.lowered import BucketedTerms, Pairing, Rotation, StructuredScore

__all__ = [
    "EmbeddingEncoding",
    "Hooked",
    "Part",
    "Projection",
    "QueryKeyTransform",
    "ScoreTerm",
    "ValueTerm",
]

Method = Callable[..., Any]


class Hooked(nn.Module):
    """A module of which several methods, not ``forward`` alone, run inside its hooks.

    Hooks bring a module's parameters to where they are needed before a call and take them away
    after it (accelerate's offloading, FSDP's gathering). A method that reads parameters outside a
    call finds none. So where a subclass overrides a method named in ``hooked``, it runs as a call
    of the module.
    """

    hooked: ClassVar[tuple[str, ...]] = ()
    """Methods that run inside the hooks, beside ``forward``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = _dispatching(cls.__dict__["forward"])
        for name in cls.hooked:
            if name in cls.__dict__ and any(hasattr(base, name) for base in cls.__bases__):
                setattr(cls, name, _as_call(cls.__dict__[name]))


def _as_call(method: Method) -> Method:
    @wraps(method)
    def call(self: Hooked, *args: Any, **kwargs: Any) -> Any:
        return self(*args, method=method, **kwargs)

    return call


def _dispatching(forward: Method) -> Method:
    @wraps(forward)
    def dispatch(self: Hooked, *args: Any, method: Method = forward, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return dispatch


class Projection(Protocol):
    """A map from token vectors to the queries, or the keys, of all heads; ``nn.Linear`` is one."""

    @property
    def in_features(self) -> int:
        """Width C of token vectors."""

    @property
    def out_features(self) -> int:
        """Width of all heads together."""

    def __call__(self, x: Float[Tensor, "*places C"], /) -> Float[Tensor, "*places HD"]:
        """The projected vectors."""


class Part(Hooked):
    """What all four kinds of part have in common."""

    hooked: ClassVar[tuple[str, ...]] = ("lower", "observe")

    mixes_heads: ClassVar[bool] = False
    """Whether what one head gets depends on the queries or keys of others."""

    causal_only: ClassVar[bool] = False
    """Meaningless unless queries see the past only."""

    axes: ClassVar[tuple[int, ...] | None] = (1,)
    """Numbers of position axes the part can read; None: any."""

    heads: int | None = None
    head_dim: int | None = None
    dim: int | None = None
    causal: bool | None = None
    """The query heads, their width, the model's width and the kind of mask that the part is made
    for; None: any. Attention refuses others."""

    def observe(self, x: Float[Tensor, "B L C"], layout: Layout) -> Layout:
        """Read the layer's input ``[B, L, C]`` and note a small signal a token in the layout.

        Most parts read nothing. The signal reaches ``forward`` in ``grid.query.signal`` and
        ``grid.key.signal``, and is cached beside the keys.
        """
        return layout

    def attach(self, query: Projection, key: Projection) -> None:
        """Take the projections of the layer that the part is put in.

        Most parts have no use for them; DeBERTa projects its relative embeddings by them.
        """


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
    ) -> tuple[StructuredScore, ...] | None:
        """The same in the structured form that fast backends use; None where there is none."""
        return None


class ValueTerm(Part, ABC):
    """Adds to the weighted sum of values."""

    @abstractmethod
    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        """The summand ``[B, H, Q, D]`` of the output, from the attention weights."""

    def lower(self, grid: Grid) -> BucketedTerms | None:
        """The same as ``BucketedTerms(value=...)``; None where there is no such form."""
        return None
