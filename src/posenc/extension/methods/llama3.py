"""Llama 3.1's scaling."""

from __future__ import annotations

from posenc.encoding import Encoding
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.methods.ntk_by_parts import (
    blended,
    ramp,
    ramp_advice,
    require_ramp,
    rotations,
)


def llama3(
    encoding: Encoding, *, factor: Stretch, length: Trained, low: float = 1.0, high: float = 4.0
) -> Encoding:
    """Llama 3.1's RoPE: wavelengths up to L/high are kept, those from L/low on interpolated.

    With ``r_t = L θ_t / 2π``, pair t keeps the share ``clip((r_t - low) / (high - low), 0, 1)`` of
    its frequency and divides the rest by s: NTK-by-parts with α = 1, β = 4 and L = 8192. ``s`` is
    ``factor``, ``L`` is ``length`` in tokens. Cost: none. Differs from the release in nothing.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more (8 in Llama 3.1).
        length: L, the trained length.
        low: rotations within L (``low_freq_factor``) up to which a pair is interpolated.
        high: rotations within L (``high_freq_factor``) from which on a pair is kept.

    Raises:
        ArgumentError: if it has no RoPE as trained, or an argument is outside its domain (0 ≤ low <
            high).

    Reference: Grattafiori et al. 2024, "The Llama 3 Herd of Models",
    https://arxiv.org/abs/2407.21783, and the release of Llama 3.1.

    >>> import posenc
    >>> from posenc.extension import llama3
    >>> rope = posenc.create("rope", head_dim=6)
    >>> [round(d, 2) for d in llama3(rope, factor=8, length=512).query_key.divisors]
    [1.0, 1.07, 8.0]
    """
    rope = require_rope(encoding, "llama3", as_trained=True)
    require_ramp(low=low, high=high)
    shares = ramp(rotations(rope, length), low, high)
    return replaced(encoding, rope, rope.stretched(blended(shares, factor)))


def llama3_advice(
    encoding: Encoding, *, length: Trained, low: float = 1.0, high: float = 4.0
) -> tuple[str, ...]:
    """Effect of the ramp on the pairs of a rope trained at ``length``."""
    return ramp_advice(encoding, length=length, alpha=low, beta=high)


ENTRY = Extension(
    function=llama3,
    summary="Interpolates pairs with wavelengths past the trained length, keeps fast ones.",
    on=("rope",),
    training="helps",
    expect="As NTK-by-parts, with a shorter ramp.",
    transformers="llama3",
    advice=llama3_advice,
)
