"""LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

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
from posenc.extension.varying import VaryingRope

__all__ = ["LongRope", "longrope"]


def longrope(
    encoding: Encoding,
    *,
    factor: float,
    length: float,
    long_factors: Sequence[float] | None = None,
    short_factors: Sequence[float] | None = None,
    temperature: float | None = None,
) -> Encoding:
    """LongRoPE: each pair has its own divisor, one set for texts up to L, one for longer ones.

    Pair t turns ``long_factors[t]`` times slower in a text of n > L tokens, ``short_factors[t]``
    times slower in one of n ≤ L. Rotated features are multiplied by ``m = √(1 + ln s / ln L)``,
    whatever n. ``s`` is ``factor``, ``L`` is ``length`` in tokens, n the largest key position + 1
    of the batch row (or packed document), at this call: see ``VaryingRope`` for what that means
    under a cache. Cost: all keys are turned at each call. Differs from transformers in that each
    row has its own n, where transformers takes the longest row's for all.

    Good factors are found by search on a text: ``posenc.extension.search_factors``. Without any,
    those of NTK-by-parts' kind, ``s^(t/(d/2-1))`` for long texts and 1 for short ones, stand in.

    Args:
        encoding: with rope.
        factor: s, 1 or more.
        length: L, the length it was trained at.
        long_factors: ``[d/2]``, above 0.
        short_factors: ``[d/2]``, above 0.
        temperature: m instead of the formula (``attention_factor``).

    Raises:
        ArgumentError: when it has no rope that is as trained, or an argument is out of its
            domain.

    Reference: Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens".

    >>> import posenc
    >>> from posenc.extension import longrope
    >>> rope = posenc.create("rope", head_dim=6)
    >>> longrope(rope, factor=4, length=64, long_factors=(1, 2, 4)).query_key.long
    (1.0, 2.0, 4.0)
    """
    rope = require_unstretched(require_rope(encoding, "longrope"), "longrope")
    factor, length = require_factor(factor), require_length(length)
    pairs = rope.rotated // 2
    if long_factors is None:
        long_factors = [factor ** (t / max(1, pairs - 1)) for t in range(pairs)]
    short_factors = [1.0] * pairs if short_factors is None else short_factors
    if temperature is None:
        temperature = math.sqrt(1 + math.log(factor) / math.log(length))
    part = LongRope(
        rope=rope, length=length, long=long_factors, short=short_factors, gain=temperature
    )
    return replaced(encoding, rope, part)


class LongRope(VaryingRope):
    """RoPE with two sets of divisors; see ``longrope``."""

    def __init__(
        self,
        *,
        rope: Rope,
        length: float,
        long: Sequence[float],
        short: Sequence[float],
        gain: float,
    ) -> None:
        # Rope's own checks, for both sets.
        for name, given in (("long_factors", long), ("short_factors", short)):
            try:
                rope.stretched(given, gain=gain)
            except ArgumentError as error:
                argument = "temperature" if error.argument == "gain" else name
                raise ArgumentError(
                    argument, expected=error.expected, got=error.got, remedy=error.remedy
                ) from error
        super().__init__(rope=rope, length=length, gain=gain)
        self.long, self.short = tuple(map(float, long)), tuple(map(float, short))

    def extra_repr(self) -> str:
        return (
            f"length={self.length:g}, up to {max(self.long):g} times slower beyond, "
            f"gain={self.gain:g}"
        )

    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        long, short = (
            torch.tensor(each, dtype=lengths.dtype, device=lengths.device)
            for each in (self.long, self.short)
        )
        return torch.where(lengths.unsqueeze(-1) > self.length, long, short)


ENTRY = Extension(
    function=longrope,
    summary="Divides each pair's frequency by a factor of its own, found by search.",
    on=("rope",),
    claims=ExtensionClaims(
        decodes_as_whole=False,
        training="helps",
        expect="As good as its factors; searched ones beat the formulas, by little without "
        "training.",
        cost="(Q + K)·D·H, for all keys at each call",
        transformers="longrope",
    ),
    sample={"short_factors": (1, 1, 1, 1.5), "long_factors": (1, 2, 3, 4)},
    citation=Citation(
        authors="Ding et al.",
        title="LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
        year=2024,
        url="https://arxiv.org/abs/2402.13753",
    ),
)
