"""The geometric ladder of frequencies that sines, rotations and decays share."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["geometric_frequencies"]


def geometric_frequencies(
    count: int, width: float, base: float, *, like: Tensor
) -> Float[Tensor, " T"]:
    """``base^(-2t/width)`` for t = 0 … count-1, rounded once to ``like``'s dtype, on its device.

    Computed afresh and in float64: a stored buffer would follow the module into bfloat16, where
    base-10000 frequencies are off by radians at position 2048.
    """
    device = torch.device("cpu") if like.device.type == "mps" else like.device
    steps = torch.arange(count, dtype=torch.float64, device=device)
    return torch.pow(base, -2.0 * steps / width).to(like)
