"""RIFLEx: the pair whose period the input outgrows is slowed."""

from __future__ import annotations

import math

from posenc.arguments import Positive
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.methods.ntk_by_parts import rotations

SHARE = 0.9
"""The part of a period that the longer input may take."""


def riflex(
    encoding: Encoding, *, factor: Stretch, length: Trained, repeats: Positive | None = None
) -> Encoding:
    """RIFLEx: one pair is slowed so that the longer input stays within its period.

    ``θ'_k = 0.9 · 2π / (s L)`` if that is slower than ``θ_k``; other pairs are kept. Pair k is the
    one whose period ``2π / θ_k`` is nearest to ``repeats``, the frame from which the trained model
    repeats itself; by default the first with L within 0.9 of a period.

    ``s`` is ``factor``, ``L`` is ``length`` in tokens, in video in latent frames; θ in radians per
    token. Meant for the time axis of video, by ``on_axis``. Cost: none. Differs from the paper in
    the default of k, which is the authors' for HunyuanVideo (the fourth pair) and CogVideoX (the
    second), and in slowing alone: their code also makes a pair faster that is slow enough.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more.
        length: L, the trained length.
        repeats: in tokens, 48 latent frames in HunyuanVideo.

    Raises:
        ArgumentError: if it has no RoPE as trained, or no pair of a period of ``length / 0.9``.

    Reference: Zhao et al. 2025, "RIFLEx: A Free Lunch for Length Extrapolation in Video Diffusion
    Transformers", https://arxiv.org/abs/2502.15894.

    >>> import posenc
    >>> from posenc.extension import riflex
    >>> time = posenc.create("rope", head_dim=16, base=256, pairing="adjacent")
    >>> [round(d, 2) for d in riflex(time, factor=2, length=33).query_key.divisors[:5]]
    [1.0, 1.0, 1.0, 1.46, 1.0]
    """
    rope = require_rope(encoding, "riflex", as_trained=True)
    turns = rotations(rope, length)
    if repeats is not None:
        pair = min(range(len(turns)), key=lambda t: abs(length / turns[t] - repeats))
    else:
        pair = next((t for t, count in enumerate(turns) if count <= SHARE), len(turns))
    if pair == len(turns):
        longest = math.floor(SHARE * length / min(turns))
        raise ArgumentError(
            "length",
            expected=f"at most {longest}, 0.9 of the slowest pair's period",
            got=length,
            remedy="Use ntk or yarn, or repeats=…, the token from which the model repeats itself.",
        )
    divisors = [1.0] * len(turns)
    divisors[pair] = max(1.0, factor * turns[pair] / SHARE)
    return replaced(encoding, rope, rope.stretched(divisors))


ENTRY = Extension(
    function=riflex,
    summary="Slows the one pair of RoPE whose period the longer input outgrows.",
    on=("rope",),
    training="none",
    expect="Video to twice the trained frames without repeating itself, motion as before.",
    transformers="longrope",
    sample={"repeats": 6.0},
)
