"""Leaky ReRoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from posenc.arguments import Interval
from posenc.encoding import Encoding
from posenc.extension.banded import Moved, WindowedRope
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.methods.rerope import require_window
from posenc.grid import Grid

Leak = Annotated[float, Interval(1, remedy="1 is RoPE itself; infinity would be rerope.")]


def leaky_rerope(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained,
    window: float | None = None,
    leak: Leak | None = None,
) -> Encoding:
    """Leaky ReRoPE: distances beyond ``window`` grow ``leak`` times slower.

    ``s_ij = scale · ⟨q_i, R(Δ') k_j⟩`` with ``Δ' = Δ`` up to w, and ``±(w + (|Δ| - w) / κ)``
    beyond. ``w`` is ``window`` in tokens, ``κ`` is ``leak``, ``Δ = p_j - p_i``. Cost: by ``native``
    that of RoPE, else two products per pair. Differs from the source in nothing; its code adds
    ``log_n``.

    Args:
        encoding: with RoPE (extended or not) and no score part.
        factor: s, 1 or more.
        length: L, the trained length.
        window: w, up to L; L/2 by default.
        leak: κ, 1 or more; by default ``(s L - w) / (L - w)``, which maps the distance s·L to L.

    Raises:
        ArgumentError: if the encoding does not fit, or an argument is outside its domain.

    Reference: Su 2023, "Transformer upgrade road 12: infinite extrapolation with ReRoPE?",
    https://kexue.fm/archives/9708.

    >>> import posenc
    >>> from posenc.extension import leaky_rerope
    >>> leaky_rerope(posenc.create("rope", head_dim=8), factor=4, length=64).score.leak
    7.0
    """
    rope = require_rope(encoding, "leaky_rerope", free_score=True)
    window = require_window(window, length, share=0.5)
    if leak is None:
        leak = (factor * length - window) / (length - window) if window < length else factor
    return replaced(encoding, rope, LeakyRerope(rope=rope, window=window, leak=leak))


class LeakyRerope(WindowedRope):
    """RoPE with slower far distances; see ``leaky_rerope``."""

    leak: float

    def moved(self, grid: Grid) -> Sequence[Moved]:
        # relative to the first key, so that quotients of large positions are exact
        first = grid.key.positions[:, :1, 0]
        queries, keys = (side.positions[..., 0] - first for side in (grid.query, grid.key))
        slow, ahead = queries / self.leak, self.window * (1 - 1 / self.leak)
        others = keys / self.leak
        behind, near = Moved(slow + ahead, others), Moved(queries, keys)
        return (behind, near) if grid.causal else (behind, near, Moved(slow - ahead, others))


ENTRY = Extension(
    function=leaky_rerope,
    summary="Lets distances past a window grow more slowly.",
    on=("rope",),
    training="none",
    expect="As ReRoPE, and far tokens are still in order; up to factor times the length.",
    cost="None more by native; else Q·K·D·H once more",
    sample={"window": 3},
)
