"""How far a computation may be off: as far as the definition itself is, at the same precision."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.testing.subject import LawBroken

__all__ = ["agree_as_well", "distance", "tolerance"]

FACTOR = 4.0
"""How many times the error of the definition is allowed."""


def distance(got: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, in float64; infinite where a value is NaN.

    Raises:
        LawBroken: when the shapes differ.
    """
    if got.shape != exact.shape:
        raise LawBroken(f"shape {list(got.shape)} came out instead of {list(exact.shape)}")
    if not got.numel():
        return 0.0
    off = (got.detach().double() - exact.detach().double()).abs().max().item()
    return off if off == off else float("inf")


def tolerance(reference: Tensor, exact: Tensor, *, factor: float = FACTOR) -> float:
    """What another computation may be off, given what ``reference`` is off at the same precision.

    ``factor · max|reference - exact| + factor · ε · max(1, max|exact|)``, ε of the reference's
    dtype: the second term is for where the definition happens to be exact.

    Args:
        reference: the definition, computed in the narrow dtype.
        exact: the same in float64.
        factor: how many times worse is still right.
    """
    largest = exact.detach().double().abs().max().item() if exact.numel() else 0.0
    rounding = torch.finfo(reference.dtype).eps * max(1.0, largest)
    return factor * (distance(reference, exact) + rounding)


def agree_as_well(
    law: str,
    what: str,
    got: Tensor,
    reference: Tensor,
    exact: Tensor,
    *,
    factor: float = FACTOR,
) -> None:
    """Refuse ``got`` where it is further from ``exact`` than ``tolerance`` allows.

    Raises:
        LawBroken: saying what was compared and how far off it is.
    """
    allowed = tolerance(reference, exact, factor=factor)
    off = distance(got, exact)
    if not off <= allowed:
        raise LawBroken(
            f"{law}: {what} in {got.dtype} is off by {off:.3g} from float64, "
            f"more than {allowed:.3g} ({factor:g} times what the definition is off)"
        )
