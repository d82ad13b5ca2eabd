"""Integers as floating-point positions, without merging neighbours."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.runtime import has_values

__all__ = ["LARGEST", "exact_dtype", "exact_floats", "successors"]

LARGEST = 2**53
"""float64 holds every integer up to here; of those beyond it, only some."""

LARGEST_SINGLE = 2**24
"""float32 holds every integer up to here."""


def exact_dtype(
    low: int, high: int, device: torch.device, *, argument: str = "positions"
) -> torch.dtype:
    """float32 where it holds every integer from ``low`` to ``high``, else float64.

    While exporting a program, lengths that it leaves open are taken to fit in float32.

    Args:
        low, high: the smallest and largest integer.
        device: where the positions will be.
        argument: the name for the error.

    Raises:
        ArgumentError: where float64 does not hold them either, or the device has no float64.
    """
    if torch.compiler.is_exporting() and not (type(low) is int and type(high) is int):
        return torch.float32
    if low >= -LARGEST_SINGLE and high <= LARGEST_SINGLE:
        return torch.float32
    if low < -LARGEST or high > LARGEST:
        raise ArgumentError(
            argument,
            expected="integers up to 2^53, which float64 tells apart",
            got=f"{low} to {high}",
            remedy="Subtract a common start: relative encodings do not read it.",
        )
    if device.type == "mps":
        raise ArgumentError(
            argument,
            expected="integers up to 2^24 on a device without float64",
            got=f"{low} to {high}",
            remedy="Subtract a common start, or compute on another device.",
        )
    return torch.float64


def exact_floats(
    values: Int[Tensor, "*dims"], *, argument: str = "positions"
) -> Float[Tensor, "*dims"]:
    """Integers as float32 where it holds all of them, else as float64.

    Inside a compiled graph values are not read: types of more than 16 bits become float64 where
    the device has it.

    Raises:
        ArgumentError: as ``exact_dtype``.
    """
    if values.dtype.itemsize <= 2 or not values.numel():
        return values.to(torch.float32)
    if not has_values(values):
        return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
    low, high = (int(end) for end in values.aminmax())
    return values.to(exact_dtype(low, high, values.device, argument=argument))


def successors(positions: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """``positions + 1``; in float64 where float32 has no such number, if the host can see that."""
    seen = positions.device.type == "cpu" and has_values(positions)
    if seen and bool((positions >= LARGEST_SINGLE).any()):
        positions = positions.double()
    return positions + 1
