"""YaRN."""

from __future__ import annotations

import math

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.entry import Citation
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import (
    replaced,
    require_factor,
    require_length,
    require_rope,
    require_unstretched,
)
from posenc.extension.methods.ntk_by_parts import blended, require_ramp, rotations

__all__ = ["yarn", "yarn_advice"]

SLOWED = 1.1
"""A pair that is slowed by less is told apart as before."""


def yarn(
    encoding: Encoding,
    *,
    factor: float,
    length: float,
    alpha: float = 1.0,
    beta: float = 32.0,
    truncate: bool = True,
    temperature: float | None = None,
) -> Encoding:
    """YaRN: NTK-by-parts with a ramp over pairs, and a higher contrast of the logits.

    Pair t keeps the share ``1 - clip((t - t_β) / (t_α - t_β), 0, 1)`` of its frequency and divides
    the rest by s, where ``t_r = d · ln(L / 2πr) / (2 ln base)`` is the pair that turns r times
    within L. Rotated features are multiplied by ``m = 0.1 ln s + 1``, logits by m². ``s`` is
    ``factor``, ``L`` is ``length`` in tokens, ``d`` the rotated width. Cost: none.

    As in the authors' code and transformers, the ramp is straight in t (in the paper, and in
    ``ntk_by_parts``, in turns), t_β and t_α are rounded outwards, and with partial rotation m
    scales the rotated features only. Where base is that of learned frequencies, it is the one
    they began from.

    The defaults suit thousands of tokens. At a short trained length t_β falls below 0, where it is
    clipped: at most the fastest pair stays as it was, and rounding decides the rest.
    ``posenc.extension.advice(encoding, "yarn", …)`` says so; lower α and β then (0.5 and 4 at
    L = 64), without ``truncate``.

    Args:
        encoding: with rope.
        factor: s, 1 or more.
        length: L, the length it was trained at.
        alpha: turns (``beta_slow``) of the pair from which on all are interpolated.
        beta: turns (``beta_fast``) of the pair up to which all are left as they are.
        truncate: t_β is rounded down and t_α up.
        temperature: m instead of ``0.1 ln s + 1`` (``attention_factor``).

    Raises:
        ArgumentError: when it has no rope that is as trained, or an argument is out of its
            domain (0 < α < β).

    Reference: Peng et al. 2024, "YaRN: Efficient Context Window Extension of Large Language
    Models".

    >>> import posenc
    >>> from posenc.extension import yarn
    >>> rope = yarn(posenc.create("rope", head_dim=8), factor=4, length=512).query_key
    >>> [round(d, 2) for d in rope.divisors], round(rope.gain, 4)
    ([1.0, 1.6, 4.0, 4.0], 1.1386)
    """
    rope = require_unstretched(require_rope(encoding, "yarn"), "yarn")
    factor, length = require_factor(factor), require_length(length)
    low, high = _bounds(rope, length, alpha, beta, truncate=truncate)
    kept = _kept(rope, low, high)
    gain = 0.1 * math.log(factor) + 1 if temperature is None else temperature
    return replaced(encoding, rope, rope.stretched(blended(kept, factor), gain=gain))


def _bounds(
    rope: Rope, length: float, alpha: float, beta: float, *, truncate: bool
) -> tuple[float, float]:
    """The pairs at which the ramp begins and ends."""
    require_ramp(alpha, beta)
    if not alpha > 0:
        raise ArgumentError(
            "alpha", expected="more than 0", got=alpha, remedy="The paper's is 1, for long texts."
        )
    low, high = (
        rope.rotated * math.log(length / (2 * math.pi * turns)) / (2 * math.log(rope.base))
        for turns in (beta, alpha)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotated - 1)
    return low, high + 0.001 if low == high else high


def _kept(rope: Rope, low: float, high: float) -> list[float]:
    """The share of its frequency that each pair keeps."""
    pairs = range(rope.rotated // 2)
    return [1 - min(1.0, max(0.0, (t - low) / (high - low))) for t in pairs]


def yarn_advice(
    encoding: Encoding,
    *,
    factor: float,
    length: float,
    alpha: float = 1.0,
    beta: float = 32.0,
    truncate: bool = True,
) -> tuple[str, ...]:
    """Effect of the ramp on the pairs of a rope trained at ``length``, with warnings."""
    rope = require_unstretched(require_rope(encoding, "yarn"), "yarn")
    low, high = _bounds(rope, require_length(length), alpha, beta, truncate=truncate)
    pairs = rope.rotated // 2
    most = max(rotations(rope, length))
    if high < low:
        return (
            f"The ramp ends before it begins, since no pair turns {alpha:g} times within "
            f"{length:g} tokens: nothing at all is interpolated. Choose an alpha below {most:.2g}.",
        )
    told = [
        f"The ramp runs from pair {low:g} to pair {high:g} of 0 … {pairs - 1}: pairs up to "
        f"{low:g} stay, and from {high:g} on they are interpolated."
    ]
    if most < beta:
        told.append(
            f"beta={beta:g} is out of reach: within {length:g} tokens the fastest pair turns "
            f"{most:.3g} times. The ramp begins at pair 0 whatever beta is from there on, and only "
            f"this one stays. Choose a beta below {most:.3g} (such as {most / 2.5:.2g}, with alpha "
            f"{min(0.5, most / 20):.2g}), and truncate=False: rounding outwards can undo it."
        )
        slowed = _slowed(rope, require_factor(factor), length, low, high)
        if slowed:
            told.append(
                f"Within {length:g} tokens {', '.join(slowed)}. What turns once or more has been "
                "seen all round in training; slowed down it misleads in short contexts too, left "
                "alone in long ones. Compare the losses at both lengths."
            )
    return tuple(told)


def _slowed(rope: Rope, factor: float, length: float, low: float, high: float) -> list[str]:
    """The pairs that turn once or more, and are slowed down all the same, in words."""
    divisors = blended(_kept(rope, low, high), factor)
    return [
        f"pair {t} turns {turns:.3g} times and is slowed {divisor:.3g} times"
        for t, (turns, divisor) in enumerate(zip(rotations(rope, length), divisors, strict=True))
        if turns >= 1 and divisor >= SLOWED
    ]


ENTRY = Extension(
    function=yarn,
    summary="Interpolates slow pairs only, and raises the contrast of the logits.",
    on=("rope",),
    claims=ExtensionClaims(
        training="helps",
        expect="Among the best changes of frequency without training; good after a short one. Its "
        "defaults misbehave at short trained lengths.",
        transformers="yarn",
    ),
    sample={"alpha": 0.1, "beta": 1},
    citation=Citation(
        authors="Peng et al.",
        title="YaRN: Efficient Context Window Extension of Large Language Models",
        year=2024,
        url="https://arxiv.org/abs/2309.00071",
    ),
    advice=yarn_advice,
)
