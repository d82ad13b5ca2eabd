"""Clipped RoPE: the slowest pairs are slowed further, the last one to a stop."""

from __future__ import annotations

import math

from posenc.arguments import Fraction
from posenc.encoding import Encoding
from posenc.extension.entry import Extension
from posenc.extension.fitting import replaced, require_rope


def clipped(encoding: Encoding, *, share: Fraction = 0.3125) -> Encoding:
    """Clipped RoPE (CoPE): the slowest pairs are slowed by a cosine taper, the last one stops.

    ``θ'_t = ½ (1 + cos φ_t) θ_t`` for the last m of T pairs, with φ rising evenly from 0 at the
    first of them, which is kept, to π at the last, whose frequency becomes 0. Other pairs are kept.

    ``m`` is ``share · T``, rounded, at least 2; θ in radians per token. Pairs that do not complete
    a turn within the trained length then meet no new angles beyond it. It needs no length; methods
    that divide frequencies may precede it (``"ntk+clipped"``). Cost: none. Differs from the
    authors' code in nothing for heads of 128, whose last 20 of 64 pairs it takes; there it is 20
    for any width. Another method than the encoding ``cope``.

    Args:
        encoding: with RoPE.
        share: of the pairs that are slowed.

    Raises:
        ArgumentError: if it has no RoPE, or ``share`` is out of its domain.

    Reference: Li et al. 2026, "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context LLMs",
    https://arxiv.org/abs/2602.05258.

    >>> import posenc
    >>> from posenc.extension import clipped
    >>> rope = posenc.create("rope", head_dim=12)
    >>> [round(d, 2) for d in clipped(rope, share=0.5).query_key.divisors]
    [1.0, 1.0, 1.0, 1.0, 2.0, inf]
    """
    rope = require_rope(encoding, "clipped")
    pairs = rope.rotated // 2
    count = min(pairs, max(2, round(share * pairs)))
    tapers = [1.0] * (pairs - count)
    tapers += [(1 + math.cos(math.pi * t / max(1, count - 1))) / 2 for t in range(count)]
    divisors = [
        divisor / taper if taper else math.inf
        for divisor, taper in zip(rope.divisors or [1.0] * pairs, tapers, strict=True)
    ]
    return replaced(encoding, rope, rope.stretched(divisors, gain=rope.gain))


ENTRY = Extension(
    function=clipped,
    summary="Slows RoPE's slowest pairs by a cosine taper, the last to a stop.",
    on=("rope",),
    identity_at_one=False,
    training="helps",
    expect="Better than RoPE on long texts after training with it; without, the first loss is "
    "higher.",
    transformers="longrope",
)
