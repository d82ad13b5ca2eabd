"""Tolerances from the definition's own error in the same precision."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.testing.subject import LawBroken

FACTOR = 4.0
"""Allowed multiple of the definition's error."""


def distance(got: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, in float64, of infinities too; infinite where a value is NaN.

    Raises:
        LawBroken: if the shapes differ.
    """
    if got.shape != exact.shape:
        raise LawBroken(f"expected shape {list(exact.shape)}, got {list(got.shape)}")
    if not got.numel():
        return 0.0
    one, other = got.detach().double(), exact.detach().double()
    off = (one - other).where(one != other, 0.0).abs().max().item()
    return off if off == off else float("inf")


def size(exact: Tensor) -> float:
    """Largest absolute value of those that are finite, at least 1."""
    finite = exact.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return max(1.0, finite.abs().max().item()) if exact.numel() else 1.0


def tolerance(reference: Tensor, exact: Tensor, *, factor: float = FACTOR) -> float:
    """Allowed error of another computation, from the error of ``reference``.

    ``factor · max|reference - exact| + factor · ε · max(1, max|exact|)``, ε of the reference's
    dtype; the second term is needed if the definition is exact by chance.

    Args:
        reference: the definition in the narrow dtype.
        exact: the definition in float64.
        factor: allowed multiple of the error.
    """
    rounding = torch.finfo(reference.dtype).eps * size(exact)
    return factor * (distance(reference, exact) + rounding)
