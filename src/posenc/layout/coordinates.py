"""Coordinates of cells along the axes of a box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.arguments import check
from posenc.errors import ArgumentError

Coordinates = Literal["indices", "centred", "midpoints", "ends"]
"""Kinds of coordinates, as ``Layout.cells`` describes them."""


def along(size: int, kind: Coordinates, device: torch.device | str | None) -> Float[Tensor, " n"]:
    """Coordinates of the cells of an axis, float32."""
    cells = torch.arange(size, dtype=torch.float32, device=device)
    if kind == "centred":
        return cells - (size - size // 2)
    if kind == "midpoints":
        return (2 * cells + 1 - size) / size
    if kind == "ends":
        return (2 * cells - (size - 1)) / (size - 1) if size > 1 else cells - 1
    return cells


def raster(
    axes: Sequence[Int[Tensor, " n"] | Float[Tensor, " n"]], prefix: int
) -> Float[Tensor, "1 L A"]:
    """Positions of the cells of a box in float32, last axis fastest, after ``prefix`` zeros."""
    cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    cells = cells.to(torch.float32)
    return torch.cat([cells.new_zeros(prefix, len(axes)), cells]).unsqueeze(0)


def require_coordinates(
    given: Coordinates | Sequence[Coordinates], axes: int
) -> tuple[Coordinates, ...]:
    """The kind of coordinates of each axis.

    Raises:
        ArgumentError: unless there is one for each axis, or one for all, and an axis.
        UnknownNameError: for another kind.
    """
    if axes == 0:
        raise ArgumentError(
            "sizes", expected="cells along one axis or more", got="none", remedy="Give sizes."
        )
    one = isinstance(given, str)
    listed = check("coordinates", Sequence[Coordinates], (given,) * axes if one else given)
    if len(listed) != axes:
        raise ArgumentError(
            "coordinates",
            expected=f"{axes}, one an axis",
            got=len(listed),
            remedy="Give one for all axes, or one each.",
        )
    kinds: tuple[Coordinates, ...] = listed
    return kinds
