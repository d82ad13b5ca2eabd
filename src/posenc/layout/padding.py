"""Zeroing of the features of invalid tokens."""

from __future__ import annotations

from torch import Tensor

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
