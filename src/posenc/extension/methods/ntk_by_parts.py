"""NTK-by-parts interpolation."""

from __future__ import annotations

import math

import torch

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

__all__ = ["blended", "ntk_by_parts", "ramp_advice", "require_ramp", "rotations"]


def ntk_by_parts(
    encoding: Encoding, *, factor: float, length: float, alpha: float = 1.0, beta: float = 32.0
) -> Encoding:
    """NTK-by-parts: pairs that turn often within the trained length stay, others are interpolated.

    ``θ'_t = (1 - γ(r_t)) θ_t / s + γ(r_t) θ_t`` with ``r_t = L θ_t / 2π``, the turns of pair t
    within L, and ``γ(r)`` rising from 0 at r = α to 1 at r = β in a straight line (YaRN's paper).
    ``s`` is ``factor``, ``L`` is ``length`` in tokens, θ in radians a token.
    Cost: none. Differs from the paper in nothing; its official code lets the ramp be straight in
    t instead of r, which is what ``yarn`` here does.

    At a short trained length no pair turns 32 times, and none is left alone:
    ``posenc.extension.advice(encoding, "ntk_by_parts", …)`` says so; lower α and β then.

    Args:
        encoding: with rope.
        factor: s, 1 or more.
        length: L, the length it was trained at.
        alpha: turns at and below which a pair is interpolated.
        beta: turns at and above which a pair is left as it is.

    Raises:
        ArgumentError: when it has no rope that is as trained, or an argument is out of its
            domain (0 ≤ α < β).

    Reference: Peng et al. 2024, "YaRN: Efficient Context Window Extension of Large Language
    Models", section 3.2.

    >>> import posenc
    >>> from posenc.extension import ntk_by_parts
    >>> rope = posenc.create("rope", head_dim=6)
    >>> [round(d, 2) for d in ntk_by_parts(rope, factor=4, length=512).query_key.divisors]
    [1.0, 3.15, 4.0]
    """
    rope = require_unstretched(require_rope(encoding, "ntk_by_parts"), "ntk_by_parts")
    factor, length = require_factor(factor), require_length(length)
    require_ramp(alpha, beta)
    kept = [
        min(1.0, max(0.0, (turns - alpha) / (beta - alpha))) for turns in rotations(rope, length)
    ]
    return replaced(encoding, rope, rope.stretched(blended(kept, factor)))


def rotations(rope: Rope, length: float) -> list[float]:
    """How often each pair turns within ``length`` tokens."""
    theta = rope.frequencies(like=torch.empty((), dtype=torch.float64, device="cpu"))
    turns: list[float] = (theta.detach() * (length / (2 * math.pi))).tolist()
    return turns


def blended(kept: list[float], factor: float) -> list[float]:
    """Divisors of pairs that keep a share of their frequency and divide the rest by ``factor``."""
    return [1 / (share + (1 - share) / factor) for share in kept]


def require_ramp(alpha: float, beta: float) -> None:
    """Refuse a ramp that does not rise.

    Raises:
        ArgumentError: unless 0 ≤ α < β, both finite.
    """
    if not (math.isfinite(beta) and 0 <= alpha < beta):
        raise ArgumentError(
            "alpha",
            expected="0 ≤ alpha < beta, turns within the trained length",
            got=f"alpha {alpha:g}, beta {beta:g}",
            remedy="The paper's are 1 and 32, for thousands of tokens.",
        )


def ramp_advice(
    encoding: Encoding, *, length: float, alpha: float = 1.0, beta: float = 32.0
) -> tuple[str, ...]:
    """Effect of the ramp on the pairs of a rope trained at ``length``, with warnings."""
    rope = require_rope(encoding, "the ramp")
    turns = rotations(rope, require_length(length))
    require_ramp(alpha, beta)
    slow = sum(each <= alpha for each in turns)
    fast = sum(each >= beta for each in turns)
    told = [
        f"Of {len(turns)} pairs {fast} turn {beta:g} times or more within {length:g} tokens and "
        f"are meant to stay, {slow} turn at most {alpha:g} times and are meant to be interpolated, "
        f"{len(turns) - fast - slow} to be blended."
    ]
    if not fast:
        most = max(turns)
        told.append(
            f"beta={beta:g} is out of reach: within {length:g} tokens the fastest pair turns "
            f"{most:.3g} times, so that even neighbours are told apart less well than in training."
            f" Choose a beta below {most:.3g} (such as {most / 2.5:.2g}, with alpha "
            f"{min(0.5, most / 20):.2g})."
        )
    return tuple(told)


ENTRY = Extension(
    function=ntk_by_parts,
    summary="Interpolates the pairs that turn seldom within the trained length, keeps the others.",
    on=("rope",),
    claims=ExtensionClaims(
        training="helps",
        expect="Usable without training; near tokens are told apart as before.",
    ),
    sample={"alpha": 0.1, "beta": 1},
    citation=Citation(
        authors="Peng et al.",
        title="YaRN: Efficient Context Window Extension of Large Language Models",
        year=2024,
        url="https://arxiv.org/abs/2309.00071",
    ),
    advice=ramp_advice,
)
