"""Refusal of nested tensors, whose rows have lengths of their own."""

from __future__ import annotations

from torch import Tensor

from posenc.errors import ArgumentError


def require_regular(name: str, x: Tensor) -> None:
    """Require a tensor that is not nested.

    Raises:
        ArgumentError: naming the layouts for rows of different lengths.
    """
    if not x.is_nested:
        return
    raise ArgumentError(
        name,
        expected="rows of one length",
        got="a nested tensor",
        remedy="Pad its rows, torch.nested.to_padded_tensor(x, 0), with Layout.padded(lengths), "
        "or join them into one, torch.cat(x.unbind()), with Layout.packed(lengths).",
    )
