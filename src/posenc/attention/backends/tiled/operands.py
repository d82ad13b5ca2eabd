"""Operands of the tiled backend, all of one dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.band import Band, Kind
from posenc.attention.views import strided_view

ROWS = ("left_rows", "right_rows", "value_rows")


@dataclass(frozen=True, eq=False)
class Operands:
    """Queries, keys, values and terms of one regular problem; or gradients of them.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, H, K, D]``; v: ``[B, H, K, E]``.
        bias_by_offset: ``[H, W]``.
        left: ``[B, H, Q, F]``; left_rows ``[h, W, F]`` with h = H or 1.
        right: ``[B, H, K, F]``; right_rows ``[h, W, F]``.
        column: ``[B, H, K]``.
        value_rows: ``[h, W, E]``.
        scale: factor of the products of q and k.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B H K D"]
    v: Float[Tensor, "B H K E"]
    bias_by_offset: Float[Tensor, "H W"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h W F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h W F"] | None = None
    column: Float[Tensor, "B H K"] | None = None
    value_rows: Float[Tensor, "h W E"] | None = None
    scale: float = 1.0

    @property
    def table_only(self) -> bool:
        """True if an offset bias is the only term, or there is none."""
        others = (self.left, self.right, self.column, self.value_rows)
        return all(other is None for other in others)

    def part(self, batch: int, heads: tuple[int, int]) -> Operands:
        """The same memory for some heads of one batch row."""

        def choose(name: str, tensor: Tensor) -> Tensor:
            if name == "bias_by_offset" or name.endswith("rows"):
                shared = name != "bias_by_offset" and tensor.shape[0] == 1
                return tensor if shared else tensor[slice(*heads)]
            return tensor[batch : batch + 1, slice(*heads)]

        return self._with({name: choose(name, x) for name, x in self._tensors().items()})

    def block(self, begin: int, end: int) -> Operands:
        """With these queries alone, counted from the last one, reversed and scaled."""
        q = reversed_rows(self.q, begin, end).mul_(self.scale)
        left = None if self.left is None else reversed_rows(self.left, begin, end)
        return replace(self, q=q, left=left, scale=1.0)

    def empty_block(self, rows: int) -> Operands:
        """The same memory, but zeros for the gradients of a block of queries."""
        q = self.q.new_zeros(*self.q.shape[:2], rows, self.q.shape[3])
        left = self.left
        if left is not None:
            left = left.new_zeros(*left.shape[:2], rows, left.shape[3])
        return replace(self, q=q, left=left)

    def put_block(self, begin: int, end: int, block: Operands) -> None:
        """Write gradients of a block of queries where they belong."""
        put_reversed(self.q, begin, end, block.q)
        if self.left is not None and block.left is not None:
            put_reversed(self.left, begin, end, block.left)

    def _tensors(self) -> dict[str, Tensor]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if isinstance(value, Tensor)}

    def _with(self, tensors: Mapping[str, Any]) -> Operands:
        return replace(self, **tensors)

    def far_place(self, kind: Kind) -> int:
        """A place in the outermost bucket of one side; only where some term has places."""
        if kind == "behind":
            return 0
        read = (self.bias_by_offset, self.left_rows, self.right_rows, self.value_rows)
        return next(x.shape[1] for x in read if x is not None) - 1

    def far_query(self, kind: Kind) -> Float[Tensor, "B H R"]:
        """Bias of a block's queries against keys far on one side."""
        added = self.q.new_zeros(self.q.shape[:3])
        if self.bias_by_offset is not None:
            added = added + self.bias_by_offset[:, self.far_place(kind)].unsqueeze(-1)
        if self.left is not None and self.left_rows is not None:
            row = self.left_rows[:, self.far_place(kind)].unsqueeze(-1)
            added = added + (self.left @ row).squeeze(-1)
        return added

    def far_right(self, kind: Kind, begin: int, end: int) -> Float[Tensor, "B H C"]:
        """Bias of far keys by the right rows of the outermost bucket."""
        assert self.right is not None
        assert self.right_rows is not None
        row = self.right_rows[:, self.far_place(kind)].unsqueeze(-1)
        return (self.right[:, :, begin:end] @ row).squeeze(-1)

    def far_key(self, kind: Kind, begin: int, end: int) -> Tensor | None:
        """Bias of far keys, ``[B, H, C]``; None: nothing."""
        added = None if self.column is None else self.column[:, :, begin:end]
        if self.right is not None:
            product = self.far_right(kind, begin, end)
            added = product if added is None else added + product
        return added

    def far_value(self, kind: Kind) -> Tensor | None:
        """Value row of far keys on one side, ``[h, 1, E]``; None: nothing."""
        if self.value_rows is None:
            return None
        return self.value_rows[:, self.far_place(kind)].unsqueeze(1)

    def masked_bias(self, band: Band) -> Float[Tensor, "h W"]:
        """The offset bias, or zeros where there is none, with -inf where the band hides pairs.

        Contiguous, so that tiles can be views of it.
        """
        width = band.queries + band.keys - 1
        bias = self.q.new_zeros(1, width) if self.bias_by_offset is None else self.bias_by_offset
        places = torch.arange(width, device=bias.device)
        hidden = (places < band.first) | (places > band.last)
        return bias.masked_fill(hidden, -torch.inf).contiguous()

    def zeros(self, *, bias_wanted: bool) -> Operands:
        """Zeros for all gradients; for that of the offset bias only if it is needed."""
        given = self._tensors()
        if not bias_wanted:
            given.pop("bias_by_offset", None)
        zeros: Mapping[str, Any] = {name: x.new_zeros(x.shape) for name, x in given.items()}
        return Operands(**zeros)

    def whole_mask(self) -> Float[Tensor, "B H Q K"] | None:
        """A view of the offset bias as the fused kernel's mask over all pairs; None: no bias."""
        if self.bias_by_offset is None:
            return None
        bias = self.bias_by_offset.contiguous()
        size = (self.q.shape[0], bias.shape[0], self.q.shape[2], self.k.shape[2])
        return strided_view(bias, size, (0, bias.shape[1], 1, 1))

    def own_rows(self) -> Operands:
        """The same memory, but other zeros for rows that all heads share."""
        rows = {name: getattr(self, name) for name in ROWS}
        return self._with({n: torch.zeros_like(t) for n, t in rows.items() if _shared(t)})

    def add_rows(self, other: Operands) -> None:
        """Add what is summed in ``own_rows``."""
        for name in ROWS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if _shared(mine):
                mine.add_(theirs)


def _shared(rows: Tensor | None) -> bool:
    return rows is not None and rows.shape[0] == 1


def reversed_rows(x: Float[Tensor, "B H Q *F"], begin: int, end: int) -> Float[Tensor, "B H R *F"]:
    """Queries ``begin`` to ``end`` counted from the last one, in that order; a copy."""
    return x[:, :, x.shape[2] - end : x.shape[2] - begin].flip(2)


def put_reversed(
    x: Float[Tensor, "B H Q *F"], begin: int, end: int, rows: Float[Tensor, "B H R *F"]
) -> None:
    """Write them back."""
    x[:, :, x.shape[2] - end : x.shape[2] - begin] = rows.flip(2)
