"""Tables over the offsets inside a window of cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.encodings.common.special_tokens import special_pairs
from posenc.errors import LengthError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values

CHUNK = 256
"""Queries per block when visible pairs are checked."""


@dataclass(frozen=True)
class Window:
    """A window of ``height`` by ``width`` cells and the table index of each offset inside it.

    Offsets are Δ = key - query in cells, rounded. Tables are ordered by query - key, as in Swin:
    index 0 is the key farthest below and to the right.
    """

    height: int
    width: int

    @property
    def sides(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    @property
    def spans(self) -> tuple[int, int]:
        """Offsets along each axis, ``2·side - 1``."""
        return 2 * self.height - 1, 2 * self.width - 1

    @property
    def count(self) -> int:
        """Offsets in all, ``(2·height - 1) · (2·width - 1)``."""
        return self.spans[0] * self.spans[1]

    def along(self, offset: Offsets, axis: int) -> BucketIndex:
        """Row of a table of one axis, ``0 … 2·side - 2``; ``2·side - 1`` outside the window."""
        largest = self.sides[axis] - 1
        back = -offset[..., axis].round()
        index = back.clamp(-largest, largest).long() + largest
        return index.masked_fill(back.abs() > largest, 2 * largest + 1)

    def index(self, offset: Offsets) -> BucketIndex:
        """``(Δ'_y + height - 1) · (2·width - 1) + Δ'_x + width - 1``, Δ' = query - key.

        ``count`` outside the window.
        """
        row, column = self.along(offset, 0), self.along(offset, 1)
        outside = (row >= self.spans[0]) | (column >= self.spans[1])
        return (row * self.spans[1] + column).masked_fill(outside, self.count)

    def offsets(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N A"]:
        """The offsets Δ in the order of the table, ``[N, 2]``."""
        axes = [
            torch.arange(side - 1, -side, -1, device=device, dtype=dtype) for side in self.sides
        ]
        return torch.cartesian_prod(*axes).reshape(-1, 2)

    def require(self, grid: Grid) -> bool:
        """Check that every visible pair is inside the window.

        Whole images are checked by their size; other layouts by their positions, on the CPU only,
        to avoid synchronizing with a device.

        Returns:
            True if all visible pairs are known to be inside, False if that is unknown.

        Raises:
            LengthError: when a visible pair is outside.
        """
        query, key = grid.query, grid.key
        if query.extent is not None and key.extent is not None:
            widest = [max(pair) for pair in zip(query.extent, key.extent, strict=True)]
            if widest[0] <= self.height and widest[1] <= self.width:
                return True
            if grid.dense:
                raise self._refusal(f"{widest[0] - 1} by {widest[1] - 1}")
        positions = query.positions
        if not has_values(positions) or positions.device.type != "cpu":
            return False
        if not self._contains(query, key):
            self._require_pairs(grid)
        return True

    def _contains(self, query: Layout, key: Layout) -> bool:
        """True if the window contains all offsets, masked pairs included."""
        both = (query.positions.detach(), key.positions.detach())
        if not all(side.shape[1] for side in both):
            return True
        lowest = torch.stack([side.amin((0, 1)) for side in both]).amin(0)
        highest = torch.stack([side.amax((0, 1)) for side in both]).amax(0)
        limit = torch.tensor(self.sides, device=lowest.device) - 1
        return bool(((highest - lowest).round() <= limit).all())

    def _require_pairs(self, grid: Grid) -> None:
        limit = torch.tensor(self.sides) - 1
        for begin in range(0, grid.query.length, CHUNK):
            part = grid.slice(begin, begin + CHUNK)
            separation = part.offset.detach().abs().round()
            visible = part.visible[:, 0]
            special = special_pairs(part)
            if special is not None:
                visible = visible & ~special
            outside = (separation > limit).any(-1) & visible
            if bool(outside.any()):
                first = separation.expand(*outside.shape, 2)[outside][0].tolist()
                raise self._refusal(f"{first[0]:g} by {first[1]:g}")

    def _refusal(self, got: str) -> LengthError:
        return LengthError(
            "positions",
            expected=f"offsets up to {self.height - 1} by {self.width - 1} cells, "
            f"the range of a table for {self.height} by {self.width} cells",
            got=got,
            remedy="Create a larger table, resample a trained one (posenc.extension), or restrict "
            "attention to windows (Layout.document).",
        )
