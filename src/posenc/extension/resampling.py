"""Tables of another size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from posenc.encodings.embedding.learned import Learned
from posenc.errors import ArgumentError, UnknownNameError

__all__ = [
    "Align",
    "Mode",
    "_require_prefix",
    "longer_count",
    "resampled_grid",
    "resampled_rows",
    "with_rows",
]

Align = Literal["corners", "centers"]

Mode = Literal["bicubic", "bilinear"]


def resampled_rows(
    table: Float[Tensor, "N C"], count: int, *, align: Align
) -> Float[Tensor, "M C"]:
    """``count`` rows read from the table by linear interpolation, in its dtype."""
    columns = table.detach().to(_wide(table)).T.unsqueeze(0)
    rows = interpolate(columns, size=count, mode="linear", align_corners=_corners(align))
    return rows[0].T.to(table.dtype).contiguous()


def resampled_grid(
    table: Float[Tensor, "H W C"],
    size: Sequence[int],
    *,
    align: Align,
    antialias: bool,
    mode: Mode = "bicubic",
) -> Float[Tensor, "h w C"]:
    """A grid of ``size`` cells read from the table by interpolation, in its dtype."""
    if mode not in get_args(Mode):
        raise UnknownNameError.of("mode", mode, get_args(Mode))
    if tuple(table.shape[:2]) == tuple(size):
        return table.detach().clone()
    planes = table.detach().to(_wide(table)).movedim(-1, 0).unsqueeze(0)
    corners = _corners(align)
    grid = interpolate(
        planes, size=tuple(size), mode=mode, align_corners=corners, antialias=antialias
    )
    return grid[0].movedim(0, -1).to(table.dtype).contiguous()


def rows_like(
    table: Float[Tensor, "N C"], count: int, *, generator: torch.Generator
) -> Float[Tensor, "M C"]:
    """``count`` rows drawn with the mean and spread that each feature has in the table's rows."""
    wide = _wide(table)
    trained = table.detach().to(wide)
    noise = torch.randn((count, table.shape[1]), generator=generator, device="cpu", dtype=wide)
    drawn = trained.mean(0) + noise.to(trained.device) * trained.std(0, correction=0)
    return drawn.to(table.dtype)


def with_rows(learned: Learned, rows: Float[Tensor, "N C"]) -> Learned:
    """The same learned positions with other rows, as parameters of their own."""
    with torch.device("meta"):
        part = Learned(
            dim=rows.shape[1], max_length=len(rows), fusion=learned.fusion, std=learned.std
        )
    part.table = nn.Parameter(rows, requires_grad=learned.table.requires_grad)
    return part.train(learned.training)


def longer_count(learned: Learned, factor: float, prefix: int) -> int:
    """Rows after stretching: the prefix, and ``factor`` times the others, to the nearest row."""
    return prefix + round(factor * (learned.max_length - _require_prefix(learned, prefix)))


def _require_prefix(learned: Learned, prefix: int) -> int:
    """``prefix`` if the table has rows beside it.

    Raises:
        ArgumentError: when it is negative, or leaves none.
    """
    if not 0 <= prefix < learned.max_length:
        raise ArgumentError(
            "prefix",
            expected=f"0 to {learned.max_length - 1}, rows that stay as they are",
            got=prefix,
            remedy="1 keeps the row of a class token, 2 the padding of RoBERTa and OPT.",
        )
    return prefix


def _corners(align: Align) -> bool:
    if align not in ("corners", "centers"):
        raise UnknownNameError.of("align", align, ("corners", "centers"))
    return align == "corners"


def _wide(table: Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)
