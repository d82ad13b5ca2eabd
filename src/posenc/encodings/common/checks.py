"""Checks of arguments and signals that several methods make."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.encoding.tensors import TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout


def require_tokens(tokens: TokenIds | None, reader: str, remedy: str) -> TokenIds:
    """The token ids; ArgumentError without them, which ``reader`` reads."""
    if tokens is None:
        raise ArgumentError(
            "tokens", expected=f"token ids, which {reader} reads", got=None, remedy=remedy
        )
    return tokens


def require_axes(layout: Layout, axes: int, *, remedy: str) -> None:
    """ArgumentError unless the layout's positions have ``axes`` axes."""
    if layout.axes != axes:
        raise ArgumentError("layout", expected=f"{axes} axes", got=layout.axes, remedy=remedy)


def require_signal(layout: Layout, name: str, width: int) -> Float[Tensor, "b L S"]:
    """The layout's signal, ``[B|1, L, width]``.

    Raises:
        ArgumentError: when it is missing or has another width.
    """
    if layout.signal is None or layout.signal.shape[-1] != width:
        raise ArgumentError(
            "layout",
            expected=f"a signal of {width} numbers per token, computed by {name} from the tokens",
            got="none" if layout.signal is None else f"{layout.signal.shape[-1]}",
            remedy="Use Attention, or encoding.observe(x, layout) before attend.",
        )
    return layout.signal
