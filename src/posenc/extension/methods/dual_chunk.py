"""Dual chunk attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.entry import Citation
from posenc.errors import ArgumentError
from posenc.extension.banded import Band, BandedRope
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import (
    replaced,
    require_free_score,
    require_length,
    require_rope,
)
from posenc.grid import Grid

__all__ = ["DualChunk", "dual_chunk"]


def dual_chunk(
    encoding: Encoding, *, length: float, reach: float | None = None, local: float | None = None
) -> Encoding:
    """Dual chunk attention: exact distances inside a chunk, bounded ones between chunks.

    With chunks of ``S = reach - local`` tokens, keys stand at ``p_j mod S``. A query stands at
    ``p_i mod S`` for keys of its own chunk, at ``min(p_i mod S + S, reach)`` for those of the chunk
    before, whose last ``local`` tokens so keep their distance to it, and at ``min(2S - 1, reach)``
    for all earlier ones. Cost: three products for each pair instead of one; served by ``tiled`` in
    memory linear in K. As the authors' code, whose largest position is ``reach``; in the paper it
    is one less.

    Args:
        encoding: with rope (stretched or not) and no score part; queries see the past only.
        length: L, the length it was trained at.
        reach: the largest distance to be met, below L; ¾ L by default, as in the authors' code.
        local: tokens of the chunk before at their own distance, below ``reach``; L/16 by default,
            at least 1.

    Raises:
        ArgumentError: when the encoding does not fit, or an argument is out of its domain.

    Reference: An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models".

    >>> import posenc
    >>> from posenc.extension import dual_chunk
    >>> dual_chunk(posenc.create("rope", head_dim=8), length=64).score
    DualChunk(
      reach=48, chunk=44
      (rope): Rope(rotated=8 of 8, base=10000, half)
    )
    """
    rope = require_rope(encoding, "dual_chunk")
    require_free_score(encoding, "dual_chunk")
    length = require_length(length, least=4)
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

    causal_only: ClassVar[bool] = True

    def __init__(self, *, rope: Rope, reach: float, chunk: float) -> None:
        super().__init__(rope=rope)
        self.reach, self.chunk = reach, chunk

    def extra_repr(self) -> str:
        return f"reach={self.reach:g}, chunk={self.chunk:g}"

    def bands(self, grid: Grid) -> Sequence[Band]:
        queries, keys = grid.query.positions[..., 0], grid.key.positions[..., 0]
        query_chunk, key_chunk = ((p / self.chunk).floor() for p in (queries, keys))
        inside, places = queries - query_chunk * self.chunk, keys - key_chunk * self.chunk
        apart = query_chunk.unsqueeze(2) - key_chunk.unsqueeze(1)
        farthest = torch.full_like(queries[:, :1], min(2 * self.chunk - 1, self.reach))
        return (
            Band(farthest, places),
            Band((inside + self.chunk).clamp(max=self.reach), places, apart == 1),
            Band(inside, places, apart <= 0),
        )


ENTRY = Extension(
    function=dual_chunk,
    summary="Keeps distances inside chunks, and bounds those between them.",
    on=("rope",),
    claims=ExtensionClaims(
        identity_at_one=False,
        training="none",
        expect="Stays usable without training at many times the length; order among chunks "
        "farther back than one is lost.",
        cost="2·Q·K·D·H more",
    ),
    sample={"reach": 4, "local": 1},
    citation=Citation(
        authors="An et al.",
        title="Training-Free Long-Context Scaling of Large Language Models",
        year=2024,
        url="https://arxiv.org/abs/2402.17463",
    ),
)
