"""Checks of arguments that several methods make."""

from __future__ import annotations

from posenc.encoding.tensors import Features, TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout


def require_dim(x: Features, dim: int) -> None:
    """ArgumentError unless token vectors have ``dim`` features."""
    if x.shape[-1] != dim:
        raise ArgumentError(
            "x",
            expected=f"width {dim}, the encoding's dim",
            got=x.shape[-1],
            remedy="Create the encoding with the model's width.",
        )


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
