"""What the tiled backend computes with: everything in one dtype, queries from the last to first."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.plan import Band, Kind

__all__ = ["Operands"]

SHARED = ("line", "left_rows", "right_rows", "value_rows")
"""What several heads or batch rows read."""


@dataclass(frozen=True, eq=False)
class Operands:
    """Queries (reversed and scaled), keys, values and terms of one regular problem; or gradients.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, H, K, D]``; v: ``[B, H, K, E]``.
        line: ``[H, W]``.
        left: ``[B, H, Q, F]``, reversed as q; left_rows ``[h, W, F]`` with h = H or 1.
        right: ``[B, H, K, F]``; right_rows ``[h, W, F]``.
        column: ``[B, H, K]``.
        value_rows: ``[h, W, E]``.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B H K D"]
    v: Float[Tensor, "B H K E"]
    line: Float[Tensor, "H W"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h W F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h W F"] | None = None
    column: Float[Tensor, "B H K"] | None = None
    value_rows: Float[Tensor, "h W E"] | None = None

    @property
    def table_only(self) -> bool:
        """Whether a line is the only term, if there is any."""
        others = (self.left, self.right, self.column, self.value_rows)
        return all(other is None for other in others)

    def part(self, batch: int, heads: tuple[int, int]) -> Operands:
        """The same memory for some heads of one batch row."""

        def choose(name: str, tensor: Tensor) -> Tensor:
            if name == "line" or name.endswith("rows"):
                shared = name != "line" and tensor.shape[0] == 1
                return tensor if shared else tensor[slice(*heads)]
            return tensor[batch : batch + 1, slice(*heads)]

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: choose(n, t) for n, t in given.items() if t is not None})

    def far_place(self, kind: Kind) -> int:
        """A place in the outermost bucket of one side."""
        return 0 if kind == "behind" else self.q.shape[2] + self.k.shape[2] - 2

    def far_query(self, kind: Kind, begin: int, end: int) -> Float[Tensor, "B H R"]:
        """What is added to the logits of queries against keys far on one side."""
        place = self.far_place(kind)
        added = self.q.new_zeros(*self.q.shape[:2], end - begin)
        if self.line is not None:
            added = added + self.line[:, place].unsqueeze(-1)
        if self.left is not None and self.left_rows is not None:
            row = self.left_rows[:, place].unsqueeze(-1)
            added = added + (self.left[:, :, begin:end] @ row).squeeze(-1)
        return added

    def far_right(self, kind: Kind, begin: int, end: int) -> Float[Tensor, "B H C"]:
        """What the right rows of the outermost bucket add to the logits of far keys."""
        assert self.right is not None
        assert self.right_rows is not None
        row = self.right_rows[:, self.far_place(kind)].unsqueeze(-1)
        return (self.right[:, :, begin:end] @ row).squeeze(-1)

    def far_key(self, kind: Kind, begin: int, end: int) -> Tensor | None:
        """All that is added to the logits of far keys, ``[B, H, C]``; None: nothing."""
        added = None if self.column is None else self.column[:, :, begin:end]
        if self.right is not None:
            product = self.far_right(kind, begin, end)
            added = product if added is None else added + product
        return added

    def far_value(self, kind: Kind) -> Tensor | None:
        """What is added to the values of far keys on one side, ``[h, 1, E]``; None: nothing."""
        if self.value_rows is None:
            return None
        return self.value_rows[:, self.far_place(kind)].unsqueeze(1)

    def masked_line(self, band: Band) -> Float[Tensor, "h W"]:
        """The line with -inf where the band hides pairs; zeros for a line where there is none."""
        width = self.q.shape[2] + self.k.shape[2] - 1
        line = self.q.new_zeros(1, width) if self.line is None else self.line
        places = torch.arange(width, device=line.device)
        hidden = (places < band.first) | (places > band.last)
        return line.masked_fill(hidden, -torch.inf)

    def zeros(self, *, line: bool) -> Operands:
        """Room for the gradients of all there is, that of the line only if asked for."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if not line:
            del given["line"]
        return Operands(**{n: torch.zeros_like(t) for n, t in given.items() if t is not None})

    def apart(self) -> Operands:
        """The same memory, but other zeros for what batch rows and heads share."""
        shared = {name: getattr(self, name) for name in SHARED}
        zeros = {n: torch.zeros_like(t) for n, t in shared.items() if t is not None}
        return replace(self, **zeros)

    def add_shared(self, other: Operands) -> None:
        """Add what ``apart`` has summed."""
        for name in SHARED:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.add_(theirs)
