"""Dual chunk attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.banded import BandedRope, RotationBand
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import replaced, require_length, require_rope
from posenc.grid import Grid


def dual_chunk(
    encoding: Encoding, *, length: float, reach: float | None = None, local: float | None = None
) -> Encoding:
    """Dual chunk attention: exact distances inside a chunk, bounded ones between chunks.

    With chunks of ``S = reach - local`` tokens, the position of a key is ``p_j mod S``. That of a
    query is ``p_i mod S`` for keys of its chunk, ``min(p_i mod S + S, reach)`` for the previous
    chunk, whose last ``local`` tokens keep their distances, and ``min(2S - 1, reach)`` for earlier
    ones. Cost: three products per pair; linear memory with ``blockwise``. As the authors' code,
    with positions up to ``reach``; in the paper, up to one less.

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

    def bands(self, grid: Grid) -> Sequence[RotationBand]:
        queries, keys = grid.query.positions[..., 0], grid.key.positions[..., 0]
        query_chunk, key_chunk = ((p / self.chunk).floor() for p in (queries, keys))
        inside, positions = queries - query_chunk * self.chunk, keys - key_chunk * self.chunk
        apart = query_chunk.unsqueeze(2) - key_chunk.unsqueeze(1)
        farthest = torch.full_like(queries[:, :1], min(2 * self.chunk - 1, self.reach))
        return (
            RotationBand(farthest, positions),
            RotationBand((inside + self.chunk).clamp(max=self.reach), positions, apart == 1),
            RotationBand(inside, positions, apart <= 0),
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
)
