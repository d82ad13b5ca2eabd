"""STRING."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension.banded import Moved, WindowedRope
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.grid import Grid


def string(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained,
    shift: int | None = None,
    local: int | None = None,
    temperature: float = 1.0,
) -> Encoding:
    """STRING: far tokens are rotated by shorter distances, which are frequent in training.

    ``s_ij = scale · ⟨q_i, R(-δ) k_j⟩`` with ``δ = p_i - p_j`` where that is below S, and
    ``δ = p_i - p_j - S + W`` beyond. ``S`` is ``shift``, ``W`` is ``local``, in tokens. Meant for
    inputs of the trained length; distances exceed L from ``L + S - W`` tokens on. Cost: by
    ``native`` that of RoPE, else two products per pair. Differs from the paper in nothing; its code
    counts pairs at distance S twice, and scales rotated features by ``0.1 ln 2 + 1``, as
    ``temperature`` can.

    Args:
        encoding: with RoPE (extended or not) and no score part, for causal attention.
        factor: s, 1 or more; slightly below 2 with the default shift.
        length: L, the trained length.
        shift: S, above ``local``; by default L/3, or what s·L tokens need.
        local: W, tokens around a far one at distinct distances; min(128, L/8) by default.
        temperature: factor of rotated features.

    Raises:
        ArgumentError: if the encoding does not fit, an argument is outside its domain, or no shift
            up to L reaches s·L tokens.

    Reference: An et al. 2024, "Why Does the Effective Context Length of LLMs Fall Short?",
    https://arxiv.org/abs/2410.18745.

    >>> import posenc
    >>> from posenc.extension import string
    >>> string(posenc.create("rope", head_dim=8), factor=1.5, length=64).score
    String(
      window=40, local=8
      (rope): Rope(head_dim=8)
    )
    """
    rope = require_rope(encoding, "string", free_score=True)
    local = max(1, min(128, int(length / 8))) if local is None else local
    if not 0 < local < length:
        raise ArgumentError(
            "local",
            expected=f"from 1 to {length - 1:g}, below the trained length",
            got=local,
            remedy="Leave it out: an eighth of the trained length, at most 128.",
        )
    needed = math.ceil(factor * length - length) + local
    if needed > length:
        raise ArgumentError(
            "factor",
            expected=f"at most {2 - local / length:.4g}, which the longest shift "
            f"({length:g}, the trained length) reaches with local={local:g}",
            got=f"{factor:g}",
            remedy="STRING at most doubles the length; self_extend and rerope go farther.",
        )
    least = max(needed, local + 1)
    if shift is None:
        shift = max(int(length / 3), least)
    if not least <= shift <= length:
        why = f"what {factor:g} times the length needs" if least == needed else "more than local"
        raise ArgumentError(
            "shift",
            expected=f"from {least:g}, {why} (local={local:g}), to {length:g}, the trained length",
            got=shift,
            remedy="Leave it out: a third of the trained length, or as much more as is needed.",
        )
    warm = rope
    if temperature != 1:
        divisors = rope.divisors or (1.0,) * (rope.rotated // 2)
        warm = rope.stretched(divisors, gain=rope.gain * temperature)
    return replaced(encoding, rope, String(rope=warm, window=shift, local=local))


class String(WindowedRope):
    """RoPE with shifted far distances; see ``string``."""

    causal_only = True

    local: int

    def moved(self, grid: Grid) -> Sequence[Moved]:
        queries, keys = grid.query.positions[..., 0], grid.key.positions[..., 0]
        return Moved(queries - self.window + self.local, keys), Moved(queries, keys)


ENTRY = Extension(
    function=string,
    summary="Gives far tokens the shorter distances that training has seen more often.",
    on=("rope",),
    identity_at_one=False,
    training="none",
    expect="Better use of the trained length itself; at most twice as far.",
    cost="None more by native; else Q·K·D·H once more",
    sample={"factor": 1.5, "shift": 5, "local": 2},
)
