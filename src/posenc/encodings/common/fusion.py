"""Add or multiply position vectors into token vectors."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError

Fusion = Literal["add", "multiply"]


def fuse(x: Features, vectors: Float[Tensor, "b L C"], fusion: Fusion) -> Features:
    """``x + vectors`` or ``x · vectors``, computed in float32 or better, in ``x``'s dtype.

    Raises:
        ArgumentError: when the widths differ.
    """
    if x.shape[-1] != vectors.shape[-1]:
        raise ArgumentError(
            "x",
            expected=f"width {vectors.shape[-1]}, the encoding's dim",
            got=x.shape[-1],
            remedy="Create the encoding with the model's width.",
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    fused = x.to(wide) + vectors if fusion == "add" else x.to(wide) * vectors
    return fused.to(x.dtype)
