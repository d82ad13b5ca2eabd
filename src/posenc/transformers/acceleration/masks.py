"""Grids from the masks of transformers, and masks that are written out when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values
from posenc.transformers.acceleration.terms import ComputedOnce


def grid_of(
    queries: int,
    keys: int,
    attended: Bool[Tensor, "B K"] | None,
    *,
    causal: bool = False,
    device: torch.device | str,
    starts: tuple[int, int] | None = None,
) -> Grid:
    """The grid of the last ``queries`` of ``keys`` tokens in sequence.

    Args:
        queries, keys: numbers of tokens.
        attended: False for padding, which is masked as a key only. None: no padding.
        causal: keys after a query are masked.
        device: of the layouts.
        starts: positions of the first query and the first key, if not those of the last tokens.
    """
    first, start = (max(0, keys - queries), 0) if starts is None else starts
    key = Layout.sequence(keys, start, device=device)
    if (queries, first) == (keys, start):
        query = key
    else:
        query = Layout.sequence(queries, first, device=device)
    if attended is not None:
        key = replace(key, valid=attended)
    return Grid(query, key, causal)


def seen_by_one(grid: Grid) -> tuple[int, int, int] | None:
    """The first and the end of the keys that a single query sees, and the number of all.

    If padding hides none of them. None if it sees none, or documents or intervals say which.
    """
    if grid.intervals is not None or grid.key.document is not None or grid.shift is None:
        return None
    keys, (low, high) = grid.key.length, grid.band
    begin, end = (min(max(0, x - grid.shift), keys) for x in (low, high + 1))
    return (begin, end, keys) if begin < end else None


def all_attended(attended: Bool[Tensor, "B K"]) -> bool:
    """True if no token is known to be padding; reads the mask if it has values."""
    return has_values(attended) and bool(attended.all())


def fewest_attended(attended: Bool[Tensor, "B K"]) -> int | None:
    """The least number of keys that a batch row attends to; None for a mask without values."""
    return int(attended.sum(1).amin()) if has_values(attended) else None


class MasksRead:
    """Masks of keys, each read once for the layers that share it.

    Reading waits for all that a CUDA device has yet to do. Lives no longer than a pass.
    """

    def __init__(self) -> None:
        self._by_mask: dict[int, tuple[Tensor, tuple[Tensor | None, int | None]]] = {}

    def keys(
        self, mask: Tensor, attends: Callable[[Tensor], Bool[Tensor, "B K"]]
    ) -> tuple[Bool[Tensor, "B K"] | None, int | None]:
        """False for padding, None if there is none; and ``fewest_attended``.

        Args:
            attends: makes the first of a mask.
        """
        if torch.compiler.is_compiling():
            return attends(mask), None
        if id(mask) not in self._by_mask:
            attended = attends(mask)
            fewest = fewest_attended(attended)
            needed = None if fewest == attended.shape[1] else attended
            # The mask is kept too, so that no other tensor gets its id.
            self._by_mask[id(mask)] = mask, (needed, fewest)
        return self._by_mask[id(mask)][1]


def attended_keys(mask: Tensor | None) -> Tensor | None:
    """A mask ``[B, 1, Q, K]`` as ``[B, K]``, False for padding, if all queries see the same keys.

    None if all is seen; else, and where the mask has no values to read, the mask itself.

    Args:
        mask: bool, or added to the logits: 0 or the lowest number.
    """
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1 or not has_values(mask):
        return mask
    row = mask[:, :, :1]
    if mask.stride(2) and not torch.equal(mask, row.expand_as(mask)):
        return mask
    row = row[:, 0, 0]
    attended = row if row.dtype == torch.bool else row == 0
    if row.dtype != torch.bool and bool((row[~attended] > torch.finfo(row.dtype).min / 2).any()):
        return mask
    return None if bool(attended.all()) else attended


def added_mask(mask: Bool[Tensor, "B K"] | Tensor | None, like: Tensor) -> Tensor | None:
    """A mask that is False for padding as one that is added to logits, as eager attention takes it.

    Args:
        mask: any other, and None, is returned as it is.
        like: of the dtype and the number of queries ``[B, Q, C]``.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    if mask.dim() == 2:
        mask = mask[:, None, None].expand(-1, 1, like.shape[1], -1)
    return _added(mask, like)


def added_causal_mask(
    mask: Tensor | None, queries: int, keys: int, *, like: Tensor
) -> Float[Tensor, "b 1 Q K"]:
    """A causal mask as eager attention adds it to the logits: 0 or the lowest number.

    Args:
        mask: None or ``[B, K]``, False for padding; or ``[B, 1, Q, K]`` bool. Others come back.
        like: gives dtype and device.
    """
    if mask is not None and mask.is_floating_point():
        return mask
    if mask is None or mask.dim() == 2:
        mask = grid_of(queries, keys, mask, causal=True, device=like.device).visible
    return _added(mask, like)


def _added(mask: Bool[Tensor, "..."], like: Tensor) -> Float[Tensor, "..."]:
    """0 where a mask is True, else the lowest number."""
    return like.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(like.dtype).min)


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

    # Not functools.cached_property, which graphs cannot read in Python 3.11.
    _read: dict[str, Any] = field(default_factory=dict)

    def _once(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self._read:
            self._read[name] = find()
        return self._read[name]

    @property
    def grid(self) -> Grid | None:
        """The grid, made on first use: models make masks for kinds of layers that they lack."""
        return cast("Grid | None", self._once("grid", self.make_grid))

    @property
    def hide_nothing(self) -> bool:
        """True if every query is known to attend to every key; read once for all layers."""
        visible = cast(Tensor, self.dense)
        return bool(self._once("hide_nothing", lambda: has_values(visible) and visible.all()))

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

    Args:
        seen_by_one: as the function says, of one query without padding; None for other masks.
    """

    seen_by_one: tuple[int, int, int] | None = None
    _posenc_pairs: VisiblePairs | None
    _written: Tensor

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pairs: VisiblePairs
    ) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask._posenc_pairs = pairs
        grid = pairs.grid if shape[2] == 1 else None
        if grid is not None and grid.key.valid is None:
            mask.seen_by_one = seen_by_one(grid)
        return mask

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LazyMask({self._posenc_pairs!r})"

    def written(self) -> Shaped[Tensor, "B 1 Q K"]:
        """The mask written out, once for all layers."""
        if self._posenc_pairs is not None:
            self._written = self._posenc_pairs.written(self.dtype)
            self._posenc_pairs = self.seen_by_one = None
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
