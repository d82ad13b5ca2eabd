"""Dual chunk attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.arguments import Interval
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension.banded import BandedRope, Moved
from posenc.extension.entry import Extension
from posenc.extension.fitting import TRAINED, replaced, require_rope
from posenc.grid import Grid
from posenc.layout import Layout


def dual_chunk(
    encoding: Encoding,
    *,
    length: Annotated[float, Interval(4, remedy=TRAINED)],
    reach: float | None = None,
    local: float | None = None,
) -> Encoding:
    """Dual chunk attention: exact distances inside a chunk, bounded ones between chunks.

    With chunks of ``S = reach - local`` tokens, the position of a key is ``p_j mod S``. That of a
    query is ``p_i mod S`` for keys of its chunk, ``min(p_i mod S + S, reach)`` for the previous
    chunk, whose last ``local`` tokens keep their distances, and ``min(2S - 1, reach)`` for earlier
    ones. Cost: by ``native`` that of RoPE, else three products per pair. As the authors' code, with
    positions up to ``reach``; in the paper, up to one less.

    Args:
        encoding: with RoPE (extended or not) and no score part, for causal attention.
        length: L, the trained length.
        reach: largest distance, below L; ¾ L by default, as in the authors' code.
        local: tokens of the previous chunk at exact distances, below ``reach``; L/16 by default, at
            least 1.

    Raises:
        ArgumentError: if the encoding does not fit, or an argument is outside its domain.

    Reference: An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models",
    https://arxiv.org/abs/2402.17463.

    >>> import posenc
    >>> from posenc.extension import dual_chunk
    >>> dual_chunk(posenc.create("rope", head_dim=8), length=64).score
    DualChunk(
      reach=48, chunk=44
      (rope): Rope(head_dim=8)
    )
    """
    rope = require_rope(encoding, "dual_chunk", free_score=True)
    reach = float(int(0.75 * length)) if reach is None else reach
    local = max(1.0, float(int(length / 16))) if local is None else local
    if not (0 < local < reach < length):
        raise ArgumentError(
            "reach",
            expected=f"0 < local < reach < {length:g}, the trained length",
            got=f"local {local:g}, reach {reach:g}",
            remedy="The authors' are a sixteenth and three quarters of it.",
        )
    return replaced(encoding, rope, DualChunk(rope=rope, reach=reach, chunk=reach - local))


class DualChunk(BandedRope):
    """RoPE in chunks; see ``dual_chunk``."""

    causal_only = True

    reach: float
    chunk: float

    def _inside(self, layout: Layout) -> tuple[Float[Tensor, "b L"], Float[Tensor, "b L"]]:
        """Number of each token's chunk, and the position in it."""
        positions = layout.positions[..., 0]
        chunk = (positions / self.chunk).floor()
        return chunk, positions - chunk * self.chunk

    def moved(self, grid: Grid) -> Sequence[Moved]:
        inside, positions = (self._inside(side)[1] for side in (grid.query, grid.key))
        farthest = torch.full_like(inside[:, :1], min(2 * self.chunk - 1, self.reach))
        next_to = (inside + self.chunk).clamp(max=self.reach)
        return Moved(farthest, positions), Moved(next_to, positions), Moved(inside, positions)

    def band_of(self, grid: Grid) -> Int[Tensor, "b Q K"]:
        query_chunk, key_chunk = (self._inside(side)[0] for side in (grid.query, grid.key))
        chunks_behind = query_chunk.unsqueeze(2) - key_chunk.unsqueeze(1)
        return 2 - chunks_behind.clamp(0, 2).long()

    def edges(self, grid: Grid) -> Sequence[int | Int[Tensor, "b Q"]] | None:
        if not float(self.chunk).is_integer():
            return None
        inside = self._inside(grid.query)[1].long()
        return -inside - int(self.chunk), -inside


ENTRY = Extension(
    function=dual_chunk,
    summary="Keeps distances inside chunks, and bounds those between them.",
    on=("rope",),
    identity_at_one=False,
    stays_relative=False,
    training="none",
    expect="Stays usable without training at many times the length; order among chunks "
    "farther back than one is lost.",
    cost="None more by native; else 2·Q·K·D·H more",
    sample={"reach": 4, "local": 1},
)
