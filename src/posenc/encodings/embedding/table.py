"""Reading rows of a table at positions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.errors import LengthError
from posenc.layout import Layout

__all__ = ["read_rows", "real_positions", "require_inside"]


def require_inside(layout: Layout, count: int, *, holder: str, remedy: str) -> None:
    """Refuse a layout whose real tokens are not all at 0 … count - 1.

    Inside a compiled graph only regular layouts are checked.

    Raises:
        LengthError: with ``holder`` as what has no such position, and ``remedy``.
    """
    if layout.start is not None:
        first, last = float(layout.start), float(layout.start + layout.length - 1)
    elif torch.compiler.is_compiling() or layout.positions.is_meta:
        return
    else:
        positions = real_positions(layout)
        first, last = float(positions.min()), float(positions.max())
    if first < 0 or last > count - 1:
        raise LengthError(
            "positions",
            expected=f"0 to {count - 1}, what {holder} holds",
            got=f"{first:g} to {last:g}",
            remedy=remedy,
        )


def real_positions(layout: Layout) -> Float[Tensor, "b L"]:
    """Positions on the first axis, 0 for padding and tokens that stand nowhere."""
    positions = layout.positions[..., 0]
    if layout.valid is not None:
        positions = positions.masked_fill(~layout.valid, 0.0)
    if layout.special is not None:
        positions = positions.masked_fill(layout.special, 0.0)
    return positions


def read_rows(table: Float[Tensor, "N C"], layout: Layout) -> Float[Tensor, "b L C"]:
    """The table's rows at a layout's positions, a fractional one interpolated between neighbours.

    Positions must be inside the table (see ``require_inside``).
    """
    if layout.start is not None:
        return table[layout.start : layout.start + layout.length].unsqueeze(0)
    positions = real_positions(layout)
    last = table.shape[0] - 1
    below = positions.floor().clamp(0, last)
    share = (positions - below).unsqueeze(-1)
    index = below.long()
    above = (index + 1).clamp(max=last)
    return torch.lerp(table[index].to(share), table[above].to(share), share)
