"""Fields of two layouts whose tokens follow one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.errors import ArgumentError


def require_joinable(first: Any, second: Any) -> None:
    """Require layouts whose tokens can follow one another in each row."""
    if not isinstance(second, type(first)):
        raise ArgumentError(
            "other", expected="a Layout", got=type(second).__name__, remedy="Use Layout.sequence."
        )
    if first.axes != second.axes:
        raise ArgumentError(
            "layout",
            expected=f"{first.axes} axes as in the cached part",
            got=second.axes,
            remedy="Use the same number of axes for all chunks.",
        )
    if (first.signal is None) != (second.signal is None):
        raise ArgumentError(
            "signal",
            expected="a signal on both layouts or on neither",
            got="one on one of them",
            remedy="Call encoding.observe on every chunk before it is cached.",
        )
    if first.batch != second.batch and 1 not in (first.batch, second.batch):
        raise ArgumentError(
            "layout",
            expected=f"{first.batch} rows as in the cached part, or 1",
            got=second.batch,
            remedy="Use the same number of rows for all chunks.",
        )


def join(first: Tensor, second: Tensor) -> Tensor:
    """Tokens of two fields one after the other, rows repeated where one has a single row."""
    if first.shape[0] == second.shape[0]:
        return torch.cat([first, second], dim=1)
    rows = max(first.shape[0], second.shape[0])
    parts = [part.expand(rows, *part.shape[1:]) for part in (first, second)]
    return torch.cat(parts, dim=1)


def join_field(first: Any, second: Any, name: str, default: int | bool) -> Tensor | None:
    """A field of two layouts, ``default`` where only one has it; None where neither does."""
    values: list[Tensor | None] = [getattr(first, name), getattr(second, name)]
    if all(value is None for value in values):
        return None
    dtype = torch.bool if isinstance(default, bool) else torch.int64
    filled = [
        torch.full_like(side.order, default, dtype=dtype) if value is None else value
        for side, value in zip((first, second), values, strict=True)
    ]
    return join(*filled)
