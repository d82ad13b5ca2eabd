"""YaRN."""

from __future__ import annotations

import math

from posenc.arguments import Factor, Rate
from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.methods.ntk_by_parts import blended, ramp, require_ramp, rotations

SLOWED = 1.1
"""Smallest divisor of a pair that is reported."""


def yarn(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained,
    alpha: Rate = 1.0,
    beta: Rate = 32.0,
    truncate: bool = True,
    temperature: Factor | None = None,
) -> Encoding:
    """YaRN: NTK-by-parts with a ramp over pairs, and scaled logits.

    Pair t keeps the share ``1 - clip((t - t_β) / (t_α - t_β), 0, 1)`` of its frequency and divides
    the rest by s, where ``t_r = d · ln(L / 2πr) / (2 ln base)`` is the pair with r rotations within
    L. Rotated features are multiplied by ``m = 0.1 ln s + 1``, logits by m². ``s`` is ``factor``,
    ``L`` is ``length`` in tokens, ``d`` the rotated width. Cost: none.

    As in the authors' code and transformers, the ramp is linear in t (in the paper and in
    ``ntk_by_parts``, in rotations), t_β and t_α are rounded outwards, and with partial rotation m
    scales the rotated features only. The base of learned frequencies is their initial one.

    The defaults suit thousands of tokens. At short trained lengths t_β is clipped to 0, and at most
    the fastest pair is kept, as ``posenc.extension.advice`` reports; use lower α and β (0.5 and 4
    at L = 64), without ``truncate``.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more.
        length: L, the trained length.
        alpha: α, rotations (``beta_slow``) from which pair on all are interpolated.
        beta: β, rotations (``beta_fast``) up to which pair all are kept.
        truncate: round t_β down and t_α up.
        temperature: m, overriding the formula (``attention_factor``).

    Raises:
        ArgumentError: if it has no RoPE as trained, or an argument is outside its domain (0 < α <
            β).

    Reference: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language
    Models", https://arxiv.org/abs/2309.00071.

    >>> import posenc
    >>> from posenc.extension import yarn
    >>> rope = yarn(posenc.create("rope", head_dim=8), factor=4, length=512).query_key
    >>> [round(d, 2) for d in rope.divisors], round(rope.gain, 4)
    ([1.0, 1.6, 4.0, 4.0], 1.1386)
    """
    rope = require_rope(encoding, "yarn", as_trained=True)
    low, high = _bounds(rope, length, alpha, beta, truncate=truncate)
    shares = _kept(rope, low, high)
    gain = 0.1 * math.log(factor) + 1 if temperature is None else temperature
    return replaced(encoding, rope, rope.stretched(blended(shares, factor), gain=gain))


def _bounds(
    rope: Rope, length: float, alpha: float, beta: float, *, truncate: bool
) -> tuple[float, float]:
    """Pairs at which the ramp begins and ends."""
    require_ramp(alpha=alpha, beta=beta)
    low, high = (
        rope.rotated * math.log(length / (2 * math.pi * turns)) / (2 * math.log(rope.base))
        for turns in (beta, alpha)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotated - 1)
    return low, high + 0.001 if low == high else high


def _kept(rope: Rope, low: float, high: float) -> list[float]:
    """Share of its frequency that each pair keeps."""
    return [1 - share for share in ramp(range(rope.rotated // 2), low, high)]


def yarn_advice(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained,
    alpha: Rate = 1.0,
    beta: Rate = 32.0,
    truncate: bool = True,
) -> tuple[str, ...]:
    """Effect of the ramp on the pairs of a rope trained at ``length``, with warnings."""
    rope = require_rope(encoding, "yarn", as_trained=True)
    low, high = _bounds(rope, length, alpha, beta, truncate=truncate)
    turned = rotations(rope, length)
    most = max(turned)
    if high < low:
        return (
            f"The ramp ends before it begins, since no pair turns {alpha:g} times within "
            f"{length:g} tokens: nothing at all is interpolated. Choose an alpha below {most:.2g}.",
        )
    notes = [
        f"The ramp runs from pair {low:g} to pair {high:g} of 0 … {len(turned) - 1}: pairs up to "
        f"{low:g} stay, and from {high:g} on they are interpolated."
    ]
    if most < beta:
        notes.append(
            f"beta={beta:g} is out of reach: within {length:g} tokens the fastest pair turns "
            f"{most:.3g} times. The ramp begins at pair 0 whatever beta is from there on, and only "
            f"this one stays. Choose a beta below {most:.3g} (such as {most / 2.5:.2g}, with alpha "
            f"{min(0.5, most / 20):.2g}), and truncate=False: rounding outwards can undo it."
        )
        divisors = blended(_kept(rope, low, high), factor)
        slowed = [
            f"pair {t} turns {turns:.3g} times and is slowed {divisor:.3g} times"
            for t, (turns, divisor) in enumerate(zip(turned, divisors, strict=True))
            if turns >= 1 and divisor >= SLOWED
        ]
        if slowed:
            notes.append(
                f"Within {length:g} tokens {', '.join(slowed)}. What turns once or more has been "
                "seen all round in training; slowed down it misleads in short contexts too, left "
                "alone in long ones. Compare the losses at both lengths."
            )
    return tuple(notes)


ENTRY = Extension(
    function=yarn,
    summary="Interpolates slow pairs only, and raises the contrast of the logits.",
    on=("rope",),
    training="helps",
    expect="Among the best changes of frequency without training; good after a short one. Its "
    "defaults misbehave at short trained lengths.",
    transformers="yarn",
    sample={"alpha": 0.1, "beta": 1},
    advice=yarn_advice,
    trials={"short": ("@alpha=0.5@beta=4",)},
)
