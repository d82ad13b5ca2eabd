"""Self-Extend."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posenc.arguments import Length
from posenc.encoding import Encoding
from posenc.extension.banded import Moved, WindowedRope
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.methods.rerope import require_window
from posenc.grid import Grid


def self_extend(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained,
    window: float | None = None,
    group: Length | None = None,
) -> Encoding:
    """Self-Extend: near distances are kept, far ones counted in groups.

    ``s_ij = scale · ⟨q_i, R(-δ) k_j⟩`` with ``δ = p_i - p_j`` where that is below w, and
    ``δ = ⌊p_i/G⌋ - ⌊p_j/G⌋ + w - ⌊w/G⌋`` beyond; mirrored for keys ahead. ``w`` is ``window`` in
    tokens, ``G`` is ``group``. Groups start at multiples of G, so it is not exactly relative. Cost:
    by ``native`` that of RoPE, else two products per pair. Differs from the paper in nothing (its
    later code has w/G for ⌊w/G⌋).

    Args:
        encoding: with RoPE (extended or not) and no score part.
        factor: s, 1 or more.
        length: L, the trained length.
        window: w, up to L; L/4 by default.
        group: G, 1 or more; by default the smallest that maps distances within s·L to at most L.

    Raises:
        ArgumentError: if the encoding does not fit, or an argument is outside its domain.

    Reference: Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning",
    https://arxiv.org/abs/2401.01325.

    >>> import posenc
    >>> from posenc.extension import self_extend
    >>> self_extend(posenc.create("rope", head_dim=8), factor=4, length=64).score
    SelfExtend(
      window=16, group=5
      (rope): Rope(head_dim=8)
    )
    """
    rope = require_rope(encoding, "self_extend", free_score=True)
    window = require_window(window, length, share=0.25)
    if group is None:
        far = (factor * length - window) / (length - window) if window < length else factor
        group = math.ceil(far)
    return replaced(encoding, rope, SelfExtend(rope=rope, window=window, group=group))


class SelfExtend(WindowedRope):
    """RoPE with grouped far distances; see ``self_extend``."""

    group: int

    def moved(self, grid: Grid) -> Sequence[Moved]:
        queries, keys = grid.query.positions[..., 0], grid.key.positions[..., 0]
        grouped, others = ((places / self.group).floor() for places in (queries, keys))
        gap = self.window - self.window // self.group
        behind, near = Moved(grouped + gap, others), Moved(queries, keys)
        return (behind, near) if grid.causal else (behind, near, Moved(grouped - gap, others))


ENTRY = Extension(
    function=self_extend,
    summary="Keeps the distances of near tokens and counts those of far ones in groups.",
    on=("rope",),
    stays_relative=False,
    training="none",
    expect="The best without training, to (L - w)·G + w tokens.",
    cost="None more by native; else Q·K·D·H once more",
    sample={"window": 3},
)
