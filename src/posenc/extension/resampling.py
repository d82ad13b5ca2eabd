"""Resampling of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from posenc.encodings.embedding.learned import Learned
from posenc.errors import ArgumentError

Align = Literal["corners", "centers"]

Mode = Literal["bicubic", "bilinear"]


def resampled_rows(
    table: Float[Tensor, "N C"], count: int, *, align: Align
) -> Float[Tensor, "M C"]:
    """Linear interpolation of a table to ``count`` rows, in its dtype."""
    columns = table.detach().to(_wide(table)).T.unsqueeze(0)
    rows = interpolate(columns, size=count, mode="linear", align_corners=align == "corners")
    return rows[0].T.to(table.dtype).contiguous()


def resampled_grid(
    table: Float[Tensor, "H W C"],
    size: Sequence[int],
    *,
    align: Align,
    antialias: bool,
    mode: Mode = "bicubic",
) -> Float[Tensor, "h w C"]:
    """Interpolation of a grid to ``size`` cells, in its dtype."""
    if tuple(table.shape[:2]) == tuple(size):
        return table.detach().clone()
    planes = table.detach().to(_wide(table)).movedim(-1, 0).unsqueeze(0)
    corners = align == "corners"
    grid = interpolate(
        planes, size=tuple(size), mode=mode, align_corners=corners, antialias=antialias
    )
    return grid[0].movedim(0, -1).to(table.dtype).contiguous()


def rows_like(
    table: Float[Tensor, "N C"], count: int, *, generator: torch.Generator
) -> Float[Tensor, "M C"]:
    """``count`` rows drawn with the mean and deviation of each feature of the table."""
    wide = _wide(table)
    trained = table.detach().to(wide)
    noise = torch.randn((count, table.shape[1]), generator=generator, device="cpu", dtype=wide)
    drawn = trained.mean(0) + noise.to(trained.device) * trained.std(0, correction=0)
    return drawn.to(table.dtype)


def longer_count(learned: Learned, factor: float, prefix: int) -> int:
    """The prefix, and ``factor`` times the other rows, to the nearest row."""
    if not 0 <= prefix < learned.max_length:
        raise ArgumentError(
            "prefix",
            expected=f"0 to {learned.max_length - 1}, rows that stay as they are",
            got=prefix,
            remedy="1 keeps the row of a class token, 2 the padding of RoBERTa and OPT.",
        )
    return prefix + round(factor * (learned.max_length - prefix))


def _wide(table: Tensor) -> torch.dtype:
    return torch.promote_types(table.dtype, torch.float32)
