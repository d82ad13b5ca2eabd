"""Masks of tokens without a position or without features, and documents of all tokens."""

from __future__ import annotations

from jaxtyping import Bool, Int
from torch import Tensor, zeros_like

from posenc.layout.layout import Layout


def zero_invalid(x: Tensor, layout: Layout, *, dim: int = 1) -> Tensor:
    """``x`` with features and gradients of invalid tokens set to zero.

    Replaced, not multiplied, so NaN and infinities are removed too. Returns ``x`` itself if the
    layout has no ``valid``.

    Args:
        x: ``[B, …, L, …]``, tokens along ``dim``.
        layout: of those tokens, with ``B`` rows or one.
    """
    if layout.valid is None:
        return x
    valid = layout.valid
    shape = [valid.shape[0], *(1 for _ in x.shape[1:])]
    shape[dim] = valid.shape[1]
    return x.masked_fill(~valid.view(shape), 0)


def hidden_tokens(layout: Layout) -> Bool[Tensor, "b L"] | None:
    """Padding and special tokens, which have no position; None if there are none."""
    if layout.valid is None:
        return layout.special
    return ~layout.valid if layout.special is None else ~layout.valid | layout.special


def documents_of(layout: Layout) -> Int[Tensor, "b L"]:
    """The document of every token, 0 without documents."""
    return zeros_like(layout.order) if layout.document is None else layout.document
