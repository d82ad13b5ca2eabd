"""NTK-aware scaling that grows with the text."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.entry import Citation
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import (
    replaced,
    require_factor,
    require_length,
    require_rope,
    require_unstretched,
)
from posenc.extension.methods.ntk import require_pairs
from posenc.extension.varying import VaryingRope

__all__ = ["DynamicNtkRope", "dynamic_ntk"]


def dynamic_ntk(encoding: Encoding, *, factor: float, length: float) -> Encoding:
    """Dynamic NTK: NTK-aware scaling by ``s · n/L - (s - 1)`` once a text has n > L tokens.

    Pair t turns ``(s n/L - s + 1)^(2t/(d-2))`` times slower; up to L nothing changes; with s = 1 it
    is NTK by ``n/L``. ``s`` is ``factor``, ``L`` is ``length`` in tokens, n the largest key
    position + 1 of the batch row (or packed document), at this call: see ``VaryingRope`` for what
    that means under a cache. Cost: all keys are turned at each call. Differs from transformers in
    that each row has its own n, where transformers takes the longest row's for all, and keeps it
    until a batch is shorter than L.

    Args:
        encoding: with rope.
        factor: s, 1 or more.
        length: L, the length it was trained at.

    Raises:
        ArgumentError: when it has no rope that is as trained, only one pair turns, or an argument
            is out of its domain.

    Reference: emozilla 2023, "Dynamically Scaled RoPE further increases performance of long
    context LLaMA with zero fine-tuning" (r/LocalLLaMA).

    >>> import posenc
    >>> from posenc.extension import dynamic_ntk
    >>> dynamic_ntk(posenc.create("rope", head_dim=6), factor=2, length=64).query_key
    DynamicNtkRope(
      factor=2, length=64
      (rope): Rope(rotated=6 of 6, base=10000, half)
    )
    """
    rope = require_pairs(require_unstretched(require_rope(encoding, "dynamic_ntk"), "dynamic_ntk"))
    part = DynamicNtkRope(rope=rope, factor=require_factor(factor), length=require_length(length))
    return replaced(encoding, rope, part)


class DynamicNtkRope(VaryingRope):
    """RoPE whose base grows with the text; see ``dynamic_ntk``."""

    def __init__(self, *, rope: Rope, factor: float, length: float) -> None:
        super().__init__(rope=rope, length=length)
        self.factor = factor

    def extra_repr(self) -> str:
        return f"factor={self.factor:g}, length={self.length:g}"

    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        longer = self.factor * (lengths.clamp(min=self.length) / self.length) - (self.factor - 1)
        pairs = self.rope.rotated // 2
        steps = torch.arange(pairs, dtype=lengths.dtype, device=lengths.device) / (pairs - 1)
        return longer.unsqueeze(-1) ** steps


ENTRY = Extension(
    function=dynamic_ntk,
    summary="Raises RoPE's base as far as the text at hand needs.",
    on=("rope",),
    claims=ExtensionClaims(
        identity_at_one=False,
        decodes_as_whole=False,
        short_unchanged=True,
        training="none",
        expect="As NTK at each length; identical to the original up to the trained length.",
        cost="(Q + K)·D·H, for all keys at each call",
        transformers="dynamic",
    ),
    citation=Citation(
        authors="emozilla",
        title="Dynamically Scaled RoPE further increases performance of long context LLaMA",
        year=2023,
        url="https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr/",
    ),
)
