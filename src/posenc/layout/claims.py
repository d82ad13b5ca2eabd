"""Validation of what layouts claim of their positions: ``start``, ``extent``, ``consecutive``."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.arguments import Count, check
from posenc.errors import ArgumentError
from posenc.layout.checks import require_whole
from posenc.layout.integers import LARGEST
from posenc.runtime import has_values, is_transformed, needs_dispatch


def require_claims(layout: Any) -> tuple[int | None, tuple[int, int] | None]:
    """``start`` and ``extent`` of a layout as plain numbers.

    Raises:
        ArgumentError: where they or ``consecutive`` are of another type, or, as far as values can
            be read on the CPU, not what positions and orders are.
    """
    start, extent = layout.start, layout.extent
    if start is not None:
        start = require_whole("start", start, -LARGEST, remedy="Leave it out.")
    if extent is not None:
        extent = check("extent", tuple[Count, Count], extent, None)
    check("consecutive", bool, layout.consecutive, False)
    if _are_readable(layout.positions):
        _require_values(start, extent, layout)
        if layout.consecutive:
            require_consecutive(layout)
    return start, extent


def require_unwritten(layout: Any) -> None:
    """Require positions and orders as ``start`` and ``extent`` say, in place as they are now.

    Raises:
        ArgumentError: where they are others, as far as values can be read on the CPU.
    """
    if layout.start is None and layout.extent is None:
        return
    if _are_readable(layout.positions) and not needs_dispatch(layout.positions, layout.order):
        _require_values(layout.start, layout.extent, layout)


def _are_readable(positions: Tensor) -> bool:
    return positions.device.type == "cpu" and has_values(positions) and not is_transformed()


def _require_values(start: int | None, extent: tuple[int, int] | None, layout: Any) -> None:
    positions = layout.positions.detach()
    if start is not None:
        require_start(start, positions, layout.order)
    if extent is not None:
        require_extent(extent, positions, layout.special)


def require_start(start: int, positions: Float[Tensor, "b L A"], order: Int[Tensor, "b L"]) -> None:
    """Require positions and orders ``start, start + 1, …`` in every row."""
    expected = torch.arange(start, start + order.shape[1], device="cpu").view(1, -1, 1)
    orders = order.unsqueeze(-1)
    # most often in one row, which is compared in a tenth of the time
    if torch.equal(orders, expected) and torch.equal(positions, expected.to(positions.dtype)):
        return
    of_text = positions.shape[2] == 1
    if not (of_text and bool((orders == expected).all() & (positions == expected).all())):
        raise ArgumentError(
            "start",
            expected=f"positions and orders that are {start}, {start + 1}, … in every row",
            got="others",
            remedy="Leave it out, or use Layout.sequence(length, start).",
        )


def require_extent(
    extent: tuple[int, int], positions: Float[Tensor, "b L A"], special: Bool[Tensor, "b L"] | None
) -> None:
    """Require the cells of an image in raster order, after special tokens alone."""
    height, width = extent
    tokens = positions.shape[1]
    index = torch.arange(tokens, device=positions.device) - (tokens - height * width)
    before = index < 0
    cells = torch.stack([index // width, index % width], dim=-1)
    fits = height * width <= len(index) and positions.shape[2] == 2
    marked = not bool(before.any()) if special is None else bool((special == before).all())
    if not (fits and marked and bool((positions == cells)[:, ~before].all())):
        raise ArgumentError(
            "extent",
            expected=f"positions of {height} × {width} cells in raster order",
            got="others",
            remedy="Leave it out, or use Layout.image(height, width).",
        )


def require_consecutive(layout: Any) -> None:
    """Require real tokens of a document as far apart as they are in their row."""
    index = torch.arange(layout.length, device=layout.device)
    rows = torch.arange(layout.batch, device=layout.device).unsqueeze(1)
    document = torch.zeros_like(index) if layout.document is None else layout.document
    real = torch.ones_like(index, dtype=torch.bool) if layout.valid is None else layout.valid
    lags = (layout.positions.detach()[..., 0] - index, layout.order - index)
    parts = torch.broadcast_tensors(rows, document, *lags)  # type: ignore[no-untyped-call]
    tokens = torch.stack([part.double() for part in parts])[:, real.expand_as(parts[0])]
    # each document of a row has one lag of position and order
    steady = tokens.unique(dim=1).shape[1] == tokens[:2].unique(dim=1).shape[1]
    if layout.axes != 1 or not steady:
        raise ArgumentError(
            "consecutive",
            expected="tokens of a document as far apart as they are in their row, for True",
            got="others",
            remedy="Leave it out, or use Layout.packed(lengths) or Layout.padded(lengths).",
        )
