"""What all parts of an encoding have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Protocol

from jaxtyping import Float
from torch import Tensor, nn

from posenc.layout import Layout

__all__ = ["Hooked", "Part", "Projection"]

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
