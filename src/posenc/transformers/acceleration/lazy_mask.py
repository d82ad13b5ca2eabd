"""Masks for transformers that carry the pairs they stand for, and are written out when read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map

from posenc.grid import Grid
from posenc.runtime import has_values
from posenc.transformers.acceleration.terms import ComputedOnce

CARRIED = "_posenc_pairs"


@dataclass(eq=False)
class VisiblePairs(ComputedOnce):
    """Pairs of queries and keys that attend to each other.

    Args:
        make_grid: makes the grid of the same pairs, ``grid``; None if no grid is known.
        compute: makes the mask ``[B, 1, Q, K]``, True where a query may attend to a key; ``dense``
            is its result.
    """

    make_grid: Callable[[], Grid | None]
    compute: Callable[[], Bool[Tensor, "B 1 Q K"]]
    _grid: Grid | None = None
    _made: bool = False
    _hide_nothing: bool | None = None

    @property
    def grid(self) -> Grid | None:
        """The grid, made on first use: models make masks for kinds of layers that they lack."""
        if not self._made:
            self._grid, self._made = self.make_grid(), True
        return self._grid

    @property
    def hide_nothing(self) -> bool:
        """True if every query is known to attend to every key; read once for all layers."""
        if self._hide_nothing is None:
            visible = cast(Tensor, self.dense)
            self._hide_nothing = has_values(visible) and bool(visible.all())
        return self._hide_nothing

    def written(self, dtype: torch.dtype) -> Shaped[Tensor, "B 1 Q K"]:
        """The mask as bool, or as numbers to add to the logits: 0 or the lowest."""
        visible = cast(Tensor, self.dense)
        if dtype == torch.bool:
            return visible
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


class LazyMask(Tensor):
    """A mask ``[B, 1, Q, K]`` without storage, bool or added to the logits.

    It is written out when an operation reads it, and carries its pairs until then: afterwards its
    numbers may have been changed.
    """

    _posenc_pairs: VisiblePairs | None
    _written: Tensor

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pairs: VisiblePairs
    ) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask._posenc_pairs = pairs
        return mask

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LazyMask({self._posenc_pairs!r})"

    def written(self) -> Shaped[Tensor, "B 1 Q K"]:
        """The mask written out, once for all layers."""
        if self._posenc_pairs is not None:
            self._written = self._posenc_pairs.written(self.dtype)
            self._posenc_pairs = None
        return self._written

    __torch_function__ = cast(Any, torch._C._disabled_torch_function_impl)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.written() if isinstance(value, LazyMask) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def carrying(
    pairs: VisiblePairs, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Shaped[Tensor, "B 1 Q K"]:
    """A mask that carries pairs.

    Where a graph is being made it is written out, and leaves the graph if nothing reads it.
    """
    tracing = is_tracing()  # type: ignore[no-untyped-call]
    if not (tracing or torch.compiler.is_compiling()):
        return LazyMask(shape, dtype, device, pairs)
    mask = pairs.written(dtype)
    setattr(mask, CARRIED, pairs)
    return mask


def pairs_behind(mask: Tensor | None) -> VisiblePairs | None:
    """The pairs that a mask carries; None if it carries none."""
    return getattr(mask, CARRIED, None)


def grid_behind(mask: Tensor | None, queries: int, keys: int) -> Grid | None:
    """The grid of queries and keys that a mask stands for; None if it is not known."""
    pairs = pairs_behind(mask)
    if mask is None or pairs is None or mask.shape[2:] != (queries, keys):
        return None
    return pairs.grid


def written_out(mask: Tensor | None) -> Tensor | None:
    """A mask as a tensor with storage: bool if it carries its pairs, else as it is."""
    pairs = pairs_behind(mask)
    if pairs is not None:
        return cast(Tensor, pairs.dense)
    return mask.written() if isinstance(mask, LazyMask) else mask
