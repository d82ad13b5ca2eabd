"""Refusal of nested and sparse tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.errors import ArgumentError


def require_dense(name: str, x: Tensor) -> None:
    """Require a tensor that is neither nested nor sparse.

    Raises:
        ArgumentError: for nested tensors, naming the layouts for rows of different lengths.
    """
    if x.is_nested:
        raise ArgumentError(
            name,
            expected="rows of one length",
            got="a nested tensor",
            remedy="Pad its rows, torch.nested.to_padded_tensor(x, 0), with "
            "Layout.padded(lengths), or join them into one, torch.cat(x.unbind()), with "
            "Layout.packed(lengths).",
        )
    if x.layout is not torch.strided:
        raise ArgumentError(
            name, expected="a dense tensor", got=f"one in {x.layout}", remedy="Use .to_dense()."
        )
