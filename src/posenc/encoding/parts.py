"""Abstract parts of an encoding, one for each site where position enters a Transformer."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import wraps
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, dataclass_transform

from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import declare
from posenc.encoding.lowered import BucketedTerms, FusedScore
from posenc.encoding.rotation import RotatedBand, Rotation
from posenc.encoding.tensors import Features, Keys, Queries, Scores, StructuredTerms, TokenIds
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.integers import DOUBLE

Method = Callable[..., Any]


def _as_call(method: Method) -> Method:
    @wraps(method)
    def call(self: Part, *args: Any, **kwargs: Any) -> Any:
        return self(*args, method=method, **kwargs)

    return call


def _dispatching(forward: Method) -> Method:
    @wraps(forward)
    def dispatch(self: Part, *args: Any, method: Method = forward, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if isinstance(first, Tensor):
            self.require(first)
            if first.dtype in DOUBLE:

                def exact(x: Any) -> Any:
                    return x.in_precision_of(first) if isinstance(x, Layout | Grid) else x

                args = tuple(map(exact, args))
                kwargs = {name: exact(x) for name, x in kwargs.items()}
        return method(self, *args, **kwargs)

    return dispatch


class Projection(Protocol):
    """A projection of token vectors to the queries or keys of all heads, such as ``nn.Linear``."""

    @property
    def in_features(self) -> int:
        """Width C of token vectors."""

    @property
    def out_features(self) -> int:
        """Width of all heads together."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules that it is computed by."""

    def __call__(self, x: Float[Tensor, "*places C"], /) -> Float[Tensor, "*places HD"]:
        """The projected vectors."""


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class Part(nn.Module):
    """Base class of the four kinds of parts.

    A subclass annotates its settings as a dataclass does its fields, with domains of
    ``posenc.arguments``, and makes its parameters in ``__post_init__``; or it has a constructor.

    accelerate's offloading and FSDP's gathering make parameters available only during a call of
    the module. What a subclass defines of the methods named in ``HOOKED`` therefore runs as one.
    Beside float64 features, positions come as float64, so that what is computed of them is exact.
    """

    HOOKED: ClassVar[tuple[str, ...]] = ("bands", "fuse", "lower", "observe", "undo")
    """Methods besides ``forward`` that run inside the hooks of the module."""

    mixes_heads: ClassVar[bool] = False
    """True if a head's result depends on the queries or keys of other heads."""

    pairwise: ClassVar[bool] = True
    """True if the result for a query and a key depends on these two tokens alone, and that of an
    embedding part for a token on it alone: not on sums over other tokens, or on their number."""

    causal_only: ClassVar[bool] = False
    """True if the part requires a causal mask."""

    axes: ClassVar[tuple[int, ...] | None] = (1,)
    """Supported numbers of position axes; None: any."""

    given: Mapping[str, Any] = MappingProxyType({})
    """Arguments that a ``checked`` constructor was given."""

    heads: int | None = None
    head_dim: int | None = None
    dim: int | None = None
    causal: bool | None = None
    """Required query heads, head width, model width and causal flag; None: any. Attention raises
    an error for others."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = _dispatching(cls.__dict__["forward"])
        for name in cls.HOOKED:
            if name in cls.__dict__ and any(hasattr(base, name) for base in cls.__bases__):
                setattr(cls, name, _as_call(cls.__dict__[name]))
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if owner is nn.Module or "__dataclass_fields__" in vars(owner):  # no constructor of its own
            declare(cls)

    def extra_repr(self) -> str:
        arguments = {n: _plain(v) for n, v in self.given.items() if not isinstance(v, nn.Module)}
        return ", ".join(f"{name}={reprlib.repr(value)}" for name, value in arguments.items())

    def require(self, x: Tensor) -> None:
        """Compare the tensor that a method is called with with what the part is made for.

        ``attend`` and ``Encoding.embed`` did, where they call it.

        Raises:
            ArgumentError: for another width or number of heads.
        """

    def observe(self, x: Features, layout: Layout) -> Layout:
        """The layout with a per-token signal computed from the layer's input; unchanged by default.

        ``forward`` reads it from ``grid.query.signal`` and ``grid.key.signal``; it is cached with
        the keys.
        """
        return layout

    def attach(self, query: Projection, key: Projection) -> None:
        """Receive the projections of the layer; ignored by default.

        DeBERTa projects its relative embeddings with them.
        """


def _plain(value: object) -> object:
    """A float without a fraction as an integer, any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _require(argument: str, size: str, made_for: int | None, got: int, of: str) -> None:
    # PyTorch 2.11 traces the error too where a symbolic size is looked up in a tuple.
    if made_for is not None and made_for != got:
        raise ArgumentError(
            argument,
            expected=f"{size} {made_for}, as the encoding has",
            got=got,
            remedy=f"Create the encoding with the model's {of}.",
        )


class EmbeddingEncoding(Part, ABC):
    """Changes the token vectors before the first block or before every block."""

    every_layer: ClassVar[bool] = False
    """True if it is applied before every block (FLOATER), not only the first."""

    takes_complex: ClassVar[bool] = False
    """True if it encodes complex vectors too, of half the width."""

    lookback = 0
    """Number of preceding tokens that it reads (a causal convolution)."""

    def require(self, x: Tensor) -> None:
        width = 2 * x.shape[-1] if x.is_complex() else x.shape[-1]
        _require("x", "width", self.dim, width, "dim")

    @abstractmethod
    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        """The encoded token vectors, in the dtype of ``x``.

        Args:
            tokens: ids, for methods with a table per token.
        """


class QueryKeyTransform(Part, ABC):
    """Transforms queries and keys before their product."""

    scale: ClassVar[float | None] = None
    """Required softmax scale; None uses the default."""

    tokenwise: ClassVar[bool] = True
    """True if transformed keys can be cached: each depends on the key and its position alone.
    xPos counts from the middle of a call's queries, so its keys are transformed at every call."""

    views: ClassVar[int] = 1
    """Number of consecutive heads that share a projected query. RoPE++ makes a real and an
    imaginary head of each query."""

    widening: ClassVar[int] = 1
    """Width of transformed queries and keys as a multiple of the head width."""

    def require(self, x: Tensor) -> None:
        if x.dim() == 4:  # of queries, not of the layer's input
            _require("q", "head width", self.head_dim, x.shape[3], "head_dim")
            _require("q", "heads", self.heads, x.shape[1], "query heads")

    @abstractmethod
    def forward(
        self, q: Queries, k: Keys, grid: Grid
    ) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B G K E"]]:
        """The transformed queries and keys, in their own dtypes.

        Keys keep G heads, or are expanded to H if their transform depends on the query head.
        """

    def logit_factor(self, grid: Grid) -> Float[Tensor, "b h Q 1"] | float:
        """Factor that it multiplies logits by besides moving features: YaRN's temperature.

        Products of features that are not transformed, of latent attention, are multiplied by it.
        """
        return 1.0

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        """The transform as a rotation, for fused kernels; None if it is not one.

        Also None if keys are expanded to more heads. Of queries and keys, only their shapes, dtype
        and device matter: without parameters, it is computed once for all calls on a grid.
        """
        return None


class ScoreTerm(Part, ABC):
    """Adds to or replaces the attention logits."""

    terms: ClassVar[int] = 1
    """Number of content terms in the logit; the default scale is ``(terms · D) ** -0.5``."""

    replaces_product: ClassVar[bool] = False
    """True if ``forward`` returns the whole logit, not a term added to ``scale · q·k``."""

    replaces_softmax: ClassVar[bool] = False
    """True if ``forward`` returns log weights, with no softmax; they need not sum to 1.

    Requires ``replaces_product``.
    """

    by_position: ClassVar[bool] = False
    """True if ``forward`` depends on positions only, not on queries, keys or signals."""

    rows_by_position: ClassVar[bool] = False
    """True if queries and keys enter what ``lower`` returns by products with its rows alone.

    Tables, rows and factors depend on positions and weights. So does a ``DistanceFunction``.
    """

    reads_layout: ClassVar[bool] = False
    """True if ``lower`` reads positions or counts of tokens, not only offsets, queries and keys."""

    keys_by_keys: ClassVar[bool] = False
    """True if ``forward`` allocates K×K matrices, whatever the number of queries."""

    @abstractmethod
    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        """The term (the whole logit if ``replaces_product``), as defined in the paper.

        May allocate Q×K. Keys have one head per query head (G = H).
        """

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        """The structured form for fast backends; None if there is none.

        A term that reads keys has one head of them per query head: ``repeat_heads`` makes them.
        """
        return None

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        """A fused form for compiled kernels, if there is no structured one; None if neither exists.

        Keys as ``lower`` has them.
        """
        return None

    def bands(self, grid: Grid) -> Sequence[RotatedBand] | None:
        """The logits as products of rotated queries and keys, where each band has its own rotation.

        Every visible pair is in one band if offsets are steps of order. None if the part is none.
        """
        return None


class ValuePart(Part, ABC):
    """Changes what attention makes of values: a term added to it, or a transform around it."""

    def lower(self, grid: Grid) -> BucketedTerms | None:
        """The structured form, ``BucketedTerms(value=...)``; None if there is none."""
        return None


class ValueTransform(ValuePart, ABC):
    """Transforms values by their positions before attention, and outputs by the queries' after it.

    Transformed values are cached if it has no parameters.
    """

    @abstractmethod
    def forward(self, v: Float[Tensor, "B H L E"], layout: Layout) -> Float[Tensor, "B H L E"]:
        """The transformed values of tokens in ``layout``, in their own dtype, by position alone."""

    @abstractmethod
    def undo(self, v: Float[Tensor, "B H L E"], layout: Layout) -> Float[Tensor, "B H L E"]:
        """The inverse transform of outputs, by the positions of their queries."""


class ValueTerm(ValuePart, ABC):
    """Adds to the weighted sum of values."""

    @abstractmethod
    def forward(self, weights: Float[Tensor, "B H Q K"], grid: Grid) -> Float[Tensor, "B H Q D"]:
        """The term of the output ``[B, H, Q, D]``, from the attention weights."""


def require_causal(parts: Iterable[Part], causal: bool) -> None:
    """Compare what parts are made for with the causal mask that they are used with.

    Raises:
        ArgumentError: for a part that requires the other, or a causal mask where there is none.
    """
    for part in parts:
        if part.causal_only and not causal:
            raise ArgumentError(
                "causal",
                expected="True, without which this encoding means nothing",
                got=causal,
                remedy="Use causal=True (Grid.of(layout, causal=True)), or another encoding.",
            )
        if part.causal is not None and part.causal != causal:
            raise ArgumentError(
                "encoding",
                expected=f"one for causal={causal}, as it is used with",
                got=f"{type(part).__name__} with causal={part.causal}",
                remedy=f"Create it with causal={causal}.",
            )
