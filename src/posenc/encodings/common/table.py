"""Tables of position vectors: initial values, rows at positions, fusion with token vectors."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.encoding.tensors import Features
from posenc.encodings.common.precision import at_least_single
from posenc.errors import LengthError
from posenc.layout import Layout
from posenc.layout.padding import hidden_tokens
from posenc.runtime import has_values

LARGER = "Create it with a larger max_length."


STD = 0.02
"""Standard deviation of initial values, as in BERT and ViT."""


def draw_rows(table: Tensor, *, mean: float = 0.0) -> None:
    """Draw initial values, normal truncated at two standard deviations from the mean."""
    nn.init.trunc_normal_(table, mean, STD, a=mean - 2 * STD, b=mean + 2 * STD)


def require_inside(
    layout: Layout, count: int, holder: str, *, remedy: str = LARGER, axis: int = 0
) -> None:
    """Refuse a layout whose real tokens are not all at 0 … count - 1 on an axis.

    Inside a compiled graph, and while one is captured, only regular layouts are checked. Others
    wait for the device.

    Raises:
        LengthError: naming ``holder``, whose positions these are, and ``remedy``.
    """
    first, last = 0.0, 0.0
    if layout.start is not None:
        first, last = layout.start, layout.start + layout.length - 1
    elif layout.extent is not None and layout.valid is None:
        first, last = 0, layout.extent[axis] - 1
    elif not _are_readable(layout.positions):
        return
    else:
        positions = real_positions(layout, axis)  # which may have been written since the last call
        first, last = (float(end) for end in positions.detach().aminmax())
    if first < 0 or last > count - 1:
        raise LengthError(
            "positions",
            expected=f"0 to {count - 1}, the range of {holder}",
            got=f"{first:g} to {last:g}",
            remedy=remedy,
        )


def _are_readable(positions: Tensor) -> bool:
    if not (positions.numel() and has_values(positions)):
        return False
    return not (positions.is_cuda and torch.cuda.is_current_stream_capturing())


def real_positions(layout: Layout, axis: int = 0) -> Float[Tensor, "b L"]:
    """Positions on an axis, 0 for padding and special tokens."""
    positions, hidden = layout.positions[..., axis], hidden_tokens(layout)
    return positions if hidden is None else positions.masked_fill(hidden, 0.0)


def read_rows(table: Float[Tensor, "N C"], layout: Layout, axis: int = 0) -> Float[Tensor, "b L C"]:
    """The table's rows at positions on an axis, fractional ones interpolated linearly.

    Positions must be inside the table (see ``require_inside``).
    """
    if layout.start is not None:
        return table[layout.start : layout.start + layout.length].unsqueeze(0)
    index, above, weight = neighbours(real_positions(layout, axis), table.shape[0])
    weight = weight.unsqueeze(-1)
    weight = weight.to(torch.promote_types(weight.dtype, table.dtype))
    return torch.lerp(table[index].to(weight), table[above].to(weight), weight)


def neighbours(
    positions: Float[Tensor, "b L"], count: int
) -> tuple[Int[Tensor, "b L"], Int[Tensor, "b L"], Float[Tensor, "b L"]]:
    """The rows below and above positions in a table of ``count``, and the upper row's weight."""
    below = positions.floor().clamp(0, count - 1)
    index = below.long()
    return index, (index + 1).clamp(max=count - 1), positions - below


Fusion = Literal["add", "multiply"]


def fuse(x: Features, vectors: Float[Tensor, "b L C"], fusion: Fusion) -> Features:
    """``x + vectors`` or ``x · vectors``, computed in float32 or better, in ``x``'s dtype."""
    wide = at_least_single(x)
    return (wide + vectors if fusion == "add" else wide * vectors).to(x.dtype)
