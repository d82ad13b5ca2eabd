"""Linear layers of few rows, whose weights are read once (csrc/linear.h)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.native.build import library, missing
from posenc.attention.backends.native.library import TYPES, CLinear

VECTOR = 16
"""Numbers in the widest vectors: outputs are computed so many at a time, inputs read two such."""


def has_linear(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """True if there is a kernel for weights ``[outputs, inputs]`` on this machine."""
    whole = outputs % VECTOR == 0 < outputs and inputs % (2 * VECTOR) == 0 < inputs
    return whole and dtype in TYPES and missing() is None


def linear(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "*B O"]:
    """``x @ weight.T + bias`` without gradients, where ``has_linear``; sums in float32 at least.

    All are of one dtype, ``weight`` and ``bias`` contiguous.
    """
    x = x.contiguous()
    outputs, inputs = weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    layer = CLinear(
        *(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()),
        *(out.data_ptr(), TYPES[x.dtype], x.numel() // inputs, inputs, outputs),
    )
    library().call("linear", layer, x.dtype)
    return out
