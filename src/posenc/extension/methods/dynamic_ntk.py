"""NTK-aware scaling by the length of the input."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import Encoding
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, Trained, replaced, require_rope
from posenc.extension.methods.ntk import require_pairs
from posenc.extension.varying import VaryingRope


def dynamic_ntk(encoding: Encoding, *, factor: Stretch, length: Trained) -> Encoding:
    """Dynamic NTK: NTK-aware scaling by ``s · n/L - (s - 1)`` for inputs of n > L tokens.

    Pair t rotates ``(s n/L - s + 1)^(2t/(d-2))`` times slower; nothing changes up to L. ``s`` is
    ``factor``, ``L`` is ``length``, n the largest key position + 1 of the row or document in this
    call; see ``VaryingRope`` for its effect with a cache. Cost: all keys are rotated in each call.
    Differs from transformers, which uses the longest row's n for all rows, until a batch is shorter
    than L.

    Args:
        encoding: with RoPE.
        factor: s, 1 or more.
        length: L, the trained length.

    Raises:
        ArgumentError: if it has no RoPE as trained of at least two pairs, or an argument is outside
            its domain.

    Reference: emozilla 2023, "Dynamically Scaled RoPE further increases performance of long context
    LLaMA", https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr/.

    >>> import posenc
    >>> from posenc.extension import dynamic_ntk
    >>> dynamic_ntk(posenc.create("rope", head_dim=6), factor=2, length=64).query_key
    DynamicNtkRope(
      factor=2, length=64
      (rope): Rope(head_dim=6)
    )
    """
    rope = require_pairs(require_rope(encoding, "dynamic_ntk", as_trained=True))
    return replaced(encoding, rope, DynamicNtkRope(rope=rope, factor=factor, length=length))


class DynamicNtkRope(VaryingRope):
    """RoPE whose base grows with the length; see ``dynamic_ntk``."""

    factor: float

    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        longer = self.factor * (lengths.clamp(min=self.length) / self.length) - (self.factor - 1)
        pairs = self.rope.rotated // 2
        steps = torch.arange(pairs, dtype=lengths.dtype, device=lengths.device) / (pairs - 1)
        return longer.unsqueeze(-1) ** steps


ENTRY = Extension(
    function=dynamic_ntk,
    summary="Raises RoPE's base as far as the text at hand needs.",
    on=("rope",),
    identity_at_one=False,
    decodes_as_whole=False,
    short_unchanged=True,
    stays_relative=False,
    training="none",
    expect="As NTK at each length; identical to the original up to the trained length.",
    cost="(Q + K)·D·H, for all keys at each call",
    transformers="dynamic",
)
