"""NTK-aware change of base."""

from __future__ import annotations

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.entry import Citation
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import (
    replaced,
    require_factor,
    require_rope,
    require_unstretched,
)

__all__ = ["base_divisors", "ntk", "require_pairs"]


def ntk(encoding: Encoding, *, factor: float) -> Encoding:
    """NTK-aware scaling: RoPE with base ``base · s^(d/(d-2))``.

    Pair t then turns ``s^(2t/(d-2))`` times slower: the fastest, t = 0, as before, the slowest as
    with interpolation; in the picture of digits, a larger radix that keeps the low digits and
    interpolates the high ones. ``s`` is ``factor``, ``d`` the rotated width in features. Serves
    learned frequencies too, which it divides by the same. Cost: none. Differs from the source in
    nothing.

    Args:
        encoding: with rope.
        factor: s, 1 or more.

    Raises:
        ArgumentError: when it has no rope that is as trained, ``factor`` is below 1, or only one
            pair turns (whose base means nothing).

    Reference: bloc97 2023, "NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+)
    context size" (r/LocalLLaMA); Su 2023, kexue.fm/archives/9675.

    >>> import posenc
    >>> from posenc.extension import ntk
    >>> ntk(posenc.create("rope", head_dim=6), factor=9).query_key.divisors
    (1.0, 3.0, 9.0)
    """
    rope = require_unstretched(require_rope(encoding, "ntk"), "ntk")
    divisors = base_divisors(rope, require_factor(factor))
    return replaced(encoding, rope, rope.stretched(divisors))


def base_divisors(rope: Rope, factor: float) -> list[float]:
    """By how much slower each pair turns in base ``base · factor^(d/(d-2))``."""
    pairs = require_pairs(rope).rotated // 2
    return [factor ** (t / (pairs - 1)) for t in range(pairs)]


def require_pairs(rope: Rope) -> Rope:
    """A RoPE of at least two pairs.

    Raises:
        ArgumentError: when it has one.
    """
    if rope.rotated < 4:
        raise ArgumentError(
            "encoding",
            expected="a rope of two pairs or more, whose speeds a base sets",
            got="one pair",
            remedy="Use interpolate.",
        )
    return rope


ENTRY = Extension(
    function=ntk,
    summary="Raises RoPE's base: fast pairs keep their speed, slow ones are interpolated.",
    on=("rope",),
    claims=ExtensionClaims(
        training="helps",
        expect="Usable without training to a little less than the factor; middle pairs go beyond "
        "angles they have seen.",
    ),
    citation=Citation(
        authors="bloc97",
        title="NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+) context size",
        year=2023,
        url="https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5/",
    ),
)
