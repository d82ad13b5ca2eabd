"""Validation of what layouts claim of their positions: ``start``, ``extent``, ``consecutive``."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.arguments import Count, check
from posenc.errors import ArgumentError
from posenc.layout.checks import require_truth, require_whole
from posenc.layout.integers import LARGEST
from posenc.runtime import has_values, is_transformed, needs_dispatch


def require_claims(layout: Any) -> tuple[int | None, tuple[int, int] | None]:
    """``start`` and ``extent`` of a layout as plain numbers.

    Raises:
        ArgumentError: where they or ``consecutive`` are of another type, or, as far as values can
            be read on the CPU, not what positions and orders are.
    """
    positions, order = layout.positions.detach(), layout.order
    start = layout.start
    if start is not None:
        start = require_whole("start", start, -LARGEST, remedy="Leave it out.")
    extent = layout.extent
    if extent is not None:
        extent = check("extent", tuple[Count, Count], extent, None)
    require_truth("consecutive", layout.consecutive)
    if _are_readable(positions):
        _require_values(start, extent, layout)
        if layout.consecutive:
            require_consecutive(positions, order, layout.document, layout.valid)
    return start, extent


def require_unwritten(layout: Any) -> None:
    """Require positions and orders as ``start`` and ``extent`` say, in place as they are now.

    Raises:
        ArgumentError: where they are others, as far as values can be read on the CPU.
    """
    start, positions, order = layout.start, layout.positions, layout.order
    if start is None and layout.extent is None:
        return
    if not _are_readable(positions) or needs_dispatch(positions, order):
        return
    if start is not None:  # most often in one row, which is compared in a tenth of the time
        expected = torch.arange(start, start + order.shape[1], device="cpu").unsqueeze(0)
        same = torch.equal(order, expected)
        if same and torch.equal(positions, expected.to(positions.dtype).unsqueeze(-1)):
            return
    _require_values(start, layout.extent, layout)


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
    expected = torch.arange(start, start + order.shape[1], device=order.device)
    in_order = bool((order == expected).all())
    if positions.shape[2] != 1 or not in_order or not bool((positions[..., 0] == expected).all()):
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


def require_consecutive(
    positions: Float[Tensor, "b L A"],
    order: Int[Tensor, "b L"],
    document: Int[Tensor, "b L"] | None,
    valid: Bool[Tensor, "b L"] | None,
) -> None:
    """Require real tokens of a document as far apart as they are in their row."""
    index = torch.arange(order.shape[1], device=order.device)
    rows, documents, real, *lags = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        torch.arange(max(len(positions), len(order)), device=order.device).unsqueeze(1),
        torch.zeros_like(order) if document is None else document,
        torch.ones_like(order, dtype=torch.bool) if valid is None else valid,
        positions[..., 0] - index,
        order - index,
    )
    row, of = rows[real], documents[real]
    sorted_by = of.argsort(stable=True)
    sorted_by = sorted_by[row[sorted_by].argsort(stable=True)]
    same = (row[sorted_by].diff() == 0) & (of[sorted_by].diff() == 0)
    steady = all(not bool((lag[real][sorted_by].diff()[same] != 0).any()) for lag in lags)
    if positions.shape[2] != 1 or not steady:
        raise ArgumentError(
            "consecutive",
            expected="tokens of a document as far apart as they are in their row, for True",
            got="others",
            remedy="Leave it out, or use Layout.packed(lengths) or Layout.padded(lengths).",
        )
