"""Exact conversion of integers to floating-point positions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.runtime import has_values, is_exporting, widest

DOUBLE = (torch.float64, torch.complex128)
"""Dtypes of features beside which positions become float64."""

LARGEST = 2**53
"""All integers up to here are exact in float64."""

LARGEST_SINGLE = 2**24
"""All integers up to here are exact in float32."""


def exact_dtype(
    low: int, high: int, device: torch.device, *, argument: str = "positions"
) -> torch.dtype:
    """float32 if all integers from ``low`` to ``high`` are exact in it, else float64.

    In ``torch.export``, symbolic lengths are assumed to fit in float32.

    Args:
        low, high: the smallest and largest integer.
        device: of the positions.
        argument: name for the error.

    Raises:
        ArgumentError: if they are not exact in float64, or the device has no float64.
    """
    if is_exporting() and not (type(low) is int and type(high) is int):
        return torch.float32
    if low >= -LARGEST_SINGLE and high <= LARGEST_SINGLE:
        return torch.float32
    wide = widest(device)
    if wide != torch.float64 or low < -LARGEST or high > LARGEST:
        limit = "2^53, exact in float64" if wide == torch.float64 else "2^24, exact in float32"
        raise ArgumentError(
            argument,
            expected=f"integers up to {limit}, the widest dtype of {device}",
            got=f"{low} to {high}",
            remedy="Subtract a common start, which relative encodings ignore.",
        )
    return wide


def exact_floats(
    values: Int[Tensor, "*dims"], *, argument: str = "positions"
) -> Float[Tensor, "*dims"]:
    """Integers as float32 if all are exact in it, else as float64.

    In a compiled graph values are not read: dtypes above 16 bits become float64 if the device has
    it.

    Raises:
        ArgumentError: as ``exact_dtype``.
    """
    if values.dtype.itemsize <= 2 or not values.numel():
        return values.to(torch.float32)
    if not has_values(values):
        return values.to(widest(values.device))
    low, high = (int(end) for end in values.aminmax())
    return values.to(exact_dtype(low, high, values.device, argument=argument))


def successors(positions: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """``positions + 1``; on the CPU in float64 if float32 cannot represent it."""
    readable = positions.device.type == "cpu" and has_values(positions)
    if readable and bool((positions >= LARGEST_SINGLE).any()):
        positions = positions.double()
    return positions + 1
