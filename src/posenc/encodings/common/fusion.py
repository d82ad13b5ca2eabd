"""Add or multiply position vectors into token vectors."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from posenc.encoding.tensors import Features
from posenc.encodings.common.checks import require_dim
from posenc.encodings.common.precision import at_least_single

Fusion = Literal["add", "multiply"]


def fuse(x: Features, vectors: Float[Tensor, "b L C"], fusion: Fusion) -> Features:
    """``x + vectors`` or ``x · vectors``, computed in float32 or better, in ``x``'s dtype.

    Raises:
        ArgumentError: when the widths differ.
    """
    require_dim(x, vectors.shape[-1])
    wide = at_least_single(x)
    return (wide + vectors if fusion == "add" else wide * vectors).to(x.dtype)
