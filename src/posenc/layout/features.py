"""Validation of features and token ids beside the layout of their tokens."""

from __future__ import annotations

from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout.checks import FLOATING, INTEGERS, require_tensor
from posenc.layout.layout import Layout

SHAPE = "Its shape is [B, L, C], L being the layout's tokens."


def require_layout(name: str, value: object) -> None:
    """Require a layout."""
    if not isinstance(value, Layout):
        raise ArgumentError(
            name,
            expected="a Layout",
            got=type(value).__name__,
            remedy="Use Layout.sequence(length), for example.",
        )


def require_features(
    x: Tensor, layout: Layout, width: int | None = None, *, name: str = "x", where: str = "layout"
) -> None:
    """Require floating-point features ``[B, L, C]`` of the tokens of a layout.

    Args:
        x: the features.
        layout: of its tokens.
        width: C, if only one fits.
        name, where: of the features and the layout, for messages.
    """
    require_layout(where, layout)
    shape = ("B", layout.length, "C" if width is None else width)
    require_tensor(name, x, shape, FLOATING, remedy=SHAPE)
    require_layout_of(name, x, layout, where)


def require_token_ids(
    tokens: Tensor, layout: Layout, *, name: str = "tokens", rows: int | None = None
) -> None:
    """Require whole numbers ``[B, L]`` for the tokens of a layout, B being ``rows`` if given."""
    require_layout("layout", layout)
    shape = ("B" if rows is None else rows, layout.length)
    require_tensor(name, tokens, shape, INTEGERS, remedy="Give one id per token.")
    require_layout_of(name, tokens, layout, "layout")


def require_layout_of(name: str, x: Tensor, layout: Layout, where: str) -> None:
    """Require a layout of the batch rows of a tensor, or of one for all, on its device."""
    if layout.batch not in (1, x.shape[0]):
        raise ArgumentError(
            where,
            expected=f"1 or {x.shape[0]} batch rows, as {name} has",
            got=layout.batch,
            remedy="Give the layout one row for all, or one a batch row.",
        )
    if layout.device != x.device:
        raise ArgumentError(
            where,
            expected=f"{x.device}, where {name} is",
            got=layout.device,
            remedy="Use layout.to(device).",
        )
