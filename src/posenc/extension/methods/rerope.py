"""ReRoPE."""

from __future__ import annotations

from collections.abc import Sequence

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension.banded import Moved, WindowedRope
from posenc.extension.entry import Extension
from posenc.extension.fitting import Trained, replaced, require_rope
from posenc.grid import Grid


def rerope(encoding: Encoding, *, length: Trained, window: float | None = None) -> Encoding:
    """ReRoPE: distances are clipped at ``window``.

    ``s_ij = scale · ⟨q_i, R(Δ') k_j⟩`` with ``Δ' = clip(p_j - p_i, -w, w)``, so that no distance is
    longer than in training. ``w`` is ``window`` in tokens. Cost: by ``native`` that of RoPE, else
    two products per pair. Differs from the source in nothing; its code adds ``log_n``.

    Args:
        encoding: with RoPE (extended or not) and no score part.
        length: L, the trained length.
        window: w, up to L; L/2 by default (the source advises L/4 to L/2).

    Raises:
        ArgumentError: if the encoding does not fit, or an argument is outside its domain.

    Reference: Su 2023, "Transformer upgrade road 12: infinite extrapolation with ReRoPE?",
    https://kexue.fm/archives/9708.

    >>> import posenc
    >>> from posenc.extension import rerope
    >>> rerope(posenc.create("rope", head_dim=8), length=64).score
    Rerope(
      window=32
      (rope): Rope(head_dim=8)
    )
    """
    rope = require_rope(encoding, "rerope", free_score=True)
    window = require_window(window, length, share=0.5)
    return replaced(encoding, rope, Rerope(rope=rope, window=window))


def require_window(window: float | None, length: float, *, share: float) -> float:
    """``window``, or a share of the trained length in whole tokens.

    Raises:
        ArgumentError: unless 1 ≤ ``window`` ≤ ``length``.
    """
    if window is None:
        return max(1.0, float(int(share * length)))
    if not 1 <= window <= length:
        raise ArgumentError(
            "window",
            expected=f"1 to {length:g}, the trained length",
            got=window,
            remedy="Distances inside the window are those of training.",
        )
    return float(window)


class Rerope(WindowedRope):
    """RoPE with clipped distances; see ``rerope``."""

    def moved(self, grid: Grid) -> Sequence[Moved]:
        queries, keys = grid.query.positions[..., 0], grid.key.positions[..., 0]
        window = queries.new_full((1, 1), self.window)
        behind, near, ahead = Moved(window), Moved(queries, keys), Moved(-window)
        return (behind, near) if grid.causal else (behind, near, ahead)


ENTRY = Extension(
    function=rerope,
    summary="Counts all distances past a window as that window.",
    on=("rope",),
    identity_at_one=False,
    training="none",
    expect="No worse at any length than at the trained one; order among far tokens is lost.",
    cost="None more by native; else Q·K·D·H once more",
    sample={"window": 3},
)
