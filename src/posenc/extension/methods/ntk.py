"""NTK-aware change of base."""

from __future__ import annotations

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, replaced, require_rope


def ntk(encoding: Encoding, *, factor: Stretch) -> Encoding:
    """NTK-aware scaling: RoPE with base ``base · s^(d/(d-2))``.

    Pair t rotates ``s^(2t/(d-2))`` times slower: the fastest, t = 0, as before, the slowest as with
    interpolation. ``s`` is ``factor``, ``d`` the rotated width in features. Learned frequencies are
    divided alike. Cost: none. Differs from the source in nothing.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more.

    Raises:
        ArgumentError: if it has no RoPE as trained of at least two pairs, or ``factor`` is below 1.

    Reference: bloc97 2023, "NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+)
    context size", https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5/; Su 2023
    (kexue.fm/archives/9675).

    >>> import posenc
    >>> from posenc.extension import ntk
    >>> ntk(posenc.create("rope", head_dim=6), factor=9).query_key.divisors
    (1.0, 3.0, 9.0)
    """
    rope = require_rope(encoding, "ntk", as_trained=True)
    pairs = require_pairs(rope).rotated // 2
    divisors = [factor ** (t / (pairs - 1)) for t in range(pairs)]
    return replaced(encoding, rope, rope.stretched(divisors))


def require_pairs(rope: Rope) -> Rope:
    """Require at least two pairs.

    Raises:
        ArgumentError: for one pair, which does not depend on the base.
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
    training="helps",
    expect="Usable without training to a little less than the factor; middle pairs go beyond "
    "angles they have seen.",
    transformers="default",
)
