"""Pieces of a text laid end to end, and windows that lie in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Sizes of the pieces of a text that lie end to end in one tensor.

    A window lies in one piece. Only if all pieces are shorter than the window, it spans several.

    Args:
        sizes: of the pieces, in order.
    """

    sizes: tuple[int, ...]

    @classmethod
    def joined(cls, parts: Sequence[bytes]) -> tuple[UInt8[Tensor, " T"], Pieces]:
        """The bytes of all parts in a tensor, and its pieces."""
        joined = bytearray(b"".join(parts))
        text = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()
        return text, cls(tuple(map(len, parts)))

    def count(self, span: int) -> int:
        """Number of windows of ``span`` elements."""
        _, counts = self._begins_and_counts(span)
        return int(counts.sum())

    def begins(self, numbers: Int[Tensor, "..."], span: int) -> Int[Tensor, "..."]:
        """Begins of windows of ``span`` elements by their numbers, 0 to ``count(span) - 1``."""
        starts, counts = self._begins_and_counts(span)
        ends = counts.cumsum(0)
        piece = torch.searchsorted(ends, numbers, right=True)
        return numbers + (starts - ends + counts)[piece]

    def _begins_and_counts(self, span: int) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
        """Begins of the pieces, and the number of windows in each."""
        sizes = torch.tensor(self.sizes)
        if span > int(sizes.max()):
            sizes = sizes.sum(0, keepdim=True)
        return sizes.cumsum(0) - sizes, (sizes - span + 1).clamp(min=0)
