"""Tolerances from the definition's own error in the same precision."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.testing.subject import LawBroken

FACTOR = 4.0
"""Allowed multiple of the definition's error."""


def distance(got: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, in float64; infinite where a value is NaN.

    Raises:
        LawBroken: if the shapes differ.
    """
    if got.shape != exact.shape:
        raise LawBroken(f"expected shape {list(exact.shape)}, got {list(got.shape)}")
    if not got.numel():
        return 0.0
    off = (got.detach().double() - exact.detach().double()).abs().max().item()
    return off if off == off else float("inf")


def tolerance(reference: Tensor, exact: Tensor, *, factor: float = FACTOR) -> float:
    """Allowed error of another computation, from the error of ``reference``.

    ``factor · max|reference - exact| + factor · ε · max(1, max|exact|)``, ε of the reference's
    dtype; the second term is needed if the definition is exact by chance.

    Args:
        reference: the definition in the narrow dtype.
        exact: the definition in float64.
        factor: allowed multiple of the error.
    """
    largest = exact.detach().double().abs().max().item() if exact.numel() else 0.0
    rounding = torch.finfo(reference.dtype).eps * max(1.0, largest)
    return factor * (distance(reference, exact) + rounding)


def agree_as_well(
    law: str, label: str, got: Tensor, reference: Tensor, exact: Tensor, *, factor: float = FACTOR
) -> None:
    """Require ``got`` to equal ``exact`` within ``tolerance``.

    Raises:
        LawBroken: with the label and the difference.
    """
    allowed = tolerance(reference, exact, factor=factor)
    off = distance(got, exact)
    if not off <= allowed:
        raise LawBroken(
            f"{law}: {label} in {got.dtype} is off by {off:.3g} from float64, "
            f"more than {allowed:.3g} ({factor:g} times the error of the definition)"
        )
