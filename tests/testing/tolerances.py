"""Tolerances from the definition's own error in the same precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def agree_within(
    bounds: Sequence[float],
    got: Sequence[Tensor],
    exact: Sequence[Tensor],
    definition: Callable[[], Sequence[Tensor]],
) -> None:
    """Require results within bounds, or as exact as the definition in the same precision.

    Args:
        bounds: allowed error of each result, relative to its ``size``.
        got: the results.
        exact: the definition in float64.
        definition: computes it in the precision of ``got``; called only where a bound is exceeded.

    Raises:
        LawBroken: with the number of a result and its difference.
    """
    for index, (mine, truth, bound) in enumerate(zip(got, exact, bounds, strict=True)):
        if not distance(mine, truth) <= bound * size(truth):
            agree_as_well("bounds", f"result {index}", mine, definition()[index], truth)
