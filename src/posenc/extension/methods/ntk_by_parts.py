"""NTK-by-parts interpolation."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope


def ntk_by_parts(
    encoding: Encoding, *, factor: Stretch, length: Trained, alpha: float = 1.0, beta: float = 32.0
) -> Encoding:
    """NTK-by-parts: pairs that rotate often within the trained length are kept, others divided.

    ``θ'_t = (1 - γ(r_t)) θ_t / s + γ(r_t) θ_t`` with ``r_t = L θ_t / 2π``, the rotations of pair t
    within L, and ``γ(r)`` rising linearly from 0 at r = α to 1 at r = β. ``s`` is ``factor``, ``L``
    is ``length`` in tokens, θ in radians per token. Cost: none. Differs from the paper in nothing;
    in the authors' code the ramp is linear in t, as in ``yarn``.

    At short trained lengths no pair rotates 32 times and none is kept, as
    ``posenc.extension.advice`` reports; use lower α and β.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more.
        length: L, the trained length.
        alpha: α, rotations up to which a pair is interpolated.
        beta: β, rotations from which on a pair is kept.

    Raises:
        ArgumentError: if it has no RoPE as trained, or an argument is outside its domain (0 ≤ α <
            β).

    Reference: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language
    Models", https://arxiv.org/abs/2309.00071, section 3.2.

    >>> import posenc
    >>> from posenc.extension import ntk_by_parts
    >>> rope = posenc.create("rope", head_dim=6)
    >>> [round(d, 2) for d in ntk_by_parts(rope, factor=4, length=512).query_key.divisors]
    [1.0, 3.15, 4.0]
    """
    rope = require_rope(encoding, "ntk_by_parts", as_trained=True)
    require_ramp(alpha=alpha, beta=beta)
    shares = ramp(rotations(rope, length), alpha, beta)
    return replaced(encoding, rope, rope.stretched(blended(shares, factor)))


def rotations(rope: Rope, length: float) -> list[float]:
    """Rotations of each pair within ``length`` tokens."""
    theta = rope.frequencies(like=torch.empty((), dtype=torch.float64, device="cpu"))
    counts: list[float] = (theta.detach() * (length / (2 * math.pi))).tolist()
    return counts


def ramp(values: Iterable[float], low: float, high: float) -> list[float]:
    """0 up to ``low``, 1 from ``high`` on, and linear between."""
    return [min(1.0, max(0.0, (value - low) / (high - low))) for value in values]


def blended(shares: list[float], factor: float) -> list[float]:
    """Divisors of pairs that keep a share of their frequency and divide the rest by ``factor``."""
    return [1 / (share + (1 - share) / factor) for share in shares]


def require_ramp(**ends: float) -> None:
    """Require a rising ramp, between two ends that are named as the method's arguments.

    Raises:
        ArgumentError: unless 0 ≤ the first < the second.
    """
    (low, begin), (high, end) = ends.items()
    if not 0 <= begin < end:
        raise ArgumentError(
            low,
            expected=f"0 ≤ {low} < {high}, turns within the trained length",
            got=f"{low} {begin:g}, {high} {end:g}",
            remedy="Leave both out for the published ones, for thousands of tokens.",
        )


def ramp_advice(
    encoding: Encoding, *, length: Trained, alpha: float = 1.0, beta: float = 32.0
) -> tuple[str, ...]:
    """Effect of the ramp on the pairs of a rope trained at ``length``, with warnings."""
    rope = require_rope(encoding, "the ramp")
    counts = rotations(rope, length)
    require_ramp(alpha=alpha, beta=beta)
    slow = sum(count <= alpha for count in counts)
    fast = sum(count >= beta for count in counts)
    notes = [
        f"Of {len(counts)} pairs {fast} turn {beta:g} times or more within {length:g} tokens and "
        f"are meant to stay, {slow} turn at most {alpha:g} times and are meant to be interpolated, "
        f"{len(counts) - fast - slow} to be blended."
    ]
    if not fast:
        most = max(counts)
        notes.append(
            f"beta={beta:g} is out of reach: within {length:g} tokens the fastest pair turns "
            f"{most:.3g} times, so that even neighbours are told apart less well than in training."
            f" Choose a beta below {most:.3g} (such as {most / 2.5:.2g}, with alpha "
            f"{min(0.5, most / 20):.2g})."
        )
    return tuple(notes)


ENTRY = Extension(
    function=ntk_by_parts,
    summary="Interpolates the pairs that turn seldom within the trained length, keeps the others.",
    on=("rope",),
    training="helps",
    expect="Usable without training; near tokens are told apart as before.",
    transformers="llama3",
    sample={"alpha": 0.1, "beta": 1},
    advice=ramp_advice,
)
