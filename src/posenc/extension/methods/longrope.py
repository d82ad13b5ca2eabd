"""LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Factor
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.varying import VaryingRope


def longrope(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained,
    long_factors: Sequence[Factor] | None = None,
    short_factors: Sequence[Factor] | None = None,
    temperature: Factor | None = None,
) -> Encoding:
    """LongRoPE: a divisor for each pair, with different sets for inputs up to L and longer ones.

    Pair t rotates ``long_factors[t]`` times slower in an input of n > L tokens, else
    ``short_factors[t]`` times slower. Rotated features are multiplied by
    ``m = √(1 + ln s / ln L)``. ``s`` is ``factor``, ``L`` is ``length``, n the largest key position
    + 1 of the row or document in this call; see ``VaryingRope`` for its effect with a cache. Cost:
    all keys are rotated in each call. Differs from transformers, which uses the longest row's n for
    all rows.

    Factors are found by ``posenc.extension.search_factors``; by default ``s^(t/(d/2-1))`` for long
    inputs and 1 for short ones.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more.
        length: L, the trained length.
        long_factors: ``[d/2]``, above 0.
        short_factors: ``[d/2]``, above 0.
        temperature: m, overriding the formula (``attention_factor``).

    Raises:
        ArgumentError: if it has no RoPE as trained, or an argument is outside its domain.

    Reference: Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
    https://arxiv.org/abs/2402.13753.

    >>> import posenc
    >>> from posenc.extension import longrope
    >>> rope = posenc.create("rope", head_dim=6)
    >>> longrope(rope, factor=4, length=64, long_factors=(1, 2, 4)).query_key.long
    (1.0, 2.0, 4.0)
    """
    rope = require_rope(encoding, "longrope", as_trained=True)
    pairs = rope.rotated // 2
    if long_factors is None:
        long_factors = [factor ** (t / max(1, pairs - 1)) for t in range(pairs)]
    short_factors = [1.0] * pairs if short_factors is None else short_factors
    if temperature is None:
        temperature = math.sqrt(1 + math.log(factor) / math.log(length))
    for name, factors in (("long_factors", long_factors), ("short_factors", short_factors)):
        if len(factors) != pairs:
            raise ArgumentError(
                name,
                expected=f"{pairs} factors, one per rotated pair",
                got=len(factors),
                remedy="Leave them out for those of a formula.",
            )
    part = LongRope(
        rope=rope, length=length, long=long_factors, short=short_factors, gain=temperature
    )
    return replaced(encoding, rope, part)


class LongRope(VaryingRope):
    """RoPE with two sets of divisors; see ``longrope``."""

    long: Sequence[float]
    short: Sequence[float]

    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        long, short = (
            torch.tensor(factors, dtype=lengths.dtype, device=lengths.device)
            for factors in (self.long, self.short)
        )
        return torch.where(lengths.unsqueeze(-1) > self.length, long, short)


ENTRY = Extension(
    function=longrope,
    summary="Divides each pair's frequency by a factor of its own, found by search.",
    on=("rope",),
    decodes_as_whole=False,
    stays_relative=False,
    training="helps",
    expect="As good as its factors; searched ones beat the formulas, by little without training.",
    cost="(Q + K)·D·H, for all keys at each call",
    transformers="longrope",
    sample={"short_factors": (1, 1, 1, 1.5), "long_factors": (1, 2, 3, 4)},
)
