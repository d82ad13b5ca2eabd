"""Masks of transformers that carry the grid which they are written out from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map

from posenc.grid import Grid

CARRIED = "_posenc_grid"


class GridMask(Tensor):
    """A mask ``[B, 1, Q, K]`` without storage, which is written out when an operation reads it.

    It carries its grid until then: afterwards its numbers may have been changed.

    Args:
        shape, device: of the mask.
        grid: of the pairs.
        write: makes the mask, True where a query may attend to a key.
    """

    _posenc_grid: Grid | None
    _write: Callable[[], Tensor]
    _written: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        device: torch.device | str,
        grid: Grid,
        write: Callable[[], Tensor],
    ) -> GridMask:
        mask: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask._posenc_grid, mask._write, mask._written = grid, write, None
        return mask

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"GridMask({self._posenc_grid!r})"

    def written(self) -> Bool[Tensor, "B 1 Q K"]:
        """The mask written out, once for all layers."""
        if self._written is None:
            self._written = self._write()
        return self._written

    __torch_function__ = cast(Any, torch._C._disabled_torch_function_impl)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            if not isinstance(value, GridMask):
                return value
            value._posenc_grid = None
            return value.written()

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def carrying(
    grid: Grid, write: Callable[[], Tensor], shape: Sequence[int], device: torch.device | str
) -> Tensor:
    """A mask that carries a grid.

    Where a graph is being made it is written out, and leaves the graph if nothing reads it.
    """
    if not (torch.compiler.is_compiling() or is_tracing()):
        return GridMask(shape, device, grid, write)
    mask = write()
    setattr(mask, CARRIED, grid)
    return mask


def grid_behind(mask: Tensor | None) -> Grid | None:
    """The grid that a mask carries; None if it carries none."""
    return getattr(mask, CARRIED, None)


def written_out(mask: Tensor | None) -> Tensor | None:
    """A mask as a tensor with storage."""
    return mask.written() if isinstance(mask, GridMask) else mask
