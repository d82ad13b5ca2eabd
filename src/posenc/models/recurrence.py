"""Transformer-XL's recurrence: a long text in segments, each with a memory of those before."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention import Cache
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models.decoder import Decoder

__all__ = ["in_segments"]


def in_segments(
    model: Decoder,
    tokens: Int[Tensor, "B L"],
    *,
    segment: int,
    memory: int,
    layout: Layout | None = None,
    cache: Cache | None = None,
) -> Iterator[Float[Tensor, "B S V"]]:
    """Logits of one segment after the other, each layer seeing ``memory`` tokens before it.

    The memory of a layer is the keys and values that it made of the last ``memory`` tokens, with
    their layout, so positions go on from segment to segment. No gradient flows into it.

    Against one pass over the whole text, in evaluation:

    - with a memory as long as the past, everything is equal, in every layer;
    - with a shorter memory of M, a token sees the M tokens before its segment and what its
      segment has before it, in every layer, so that layer n reaches ``n · M`` back. That equals
      a pass with this visibility in all layers; it is a window, ``window=M + 1``, where segments
      are one token long, and none where they are longer;
    - a causal convolution (``conv``, ``path``) still has the few tokens it needs from before the
      memory;
    - absolute encodings go on counting, so a learned table ends where its rows do.

    In training two things differ from one pass: gradients end at the memory, and it holds keys
    of the weights as they were. The paper keeps the layer's input and projects it anew, with
    gradients to W_K and W_V; while weights rest that is the same.

    Args:
        model: any ``Decoder``.
        tokens: ``[B, L]`` ids.
        segment: tokens at a time, the last of them perhaps fewer.
        memory: tokens that each layer remembers; 0: none.
        layout: where the tokens are; by default they go on where ``cache`` ends.
        cache: what earlier calls left (streams longer than a batch); changed in place.

    Raises:
        ArgumentError: when ``segment`` is below 1 or ``memory`` below 0.
    """
    if segment < 1:
        raise ArgumentError("segment", expected="1 or more", got=segment, remedy="Raise it.")
    if memory < 0:
        raise ArgumentError("memory", expected="0 or more", got=memory, remedy="0: none.")
    return _segments(model, tokens, segment, memory, layout, cache or model.new_cache())


def _segments(
    model: Decoder,
    tokens: Tensor,
    segment: int,
    memory: int,
    layout: Layout | None,
    cache: Cache,
) -> Iterator[Tensor]:
    for begin in range(0, tokens.shape[1], segment):
        end = begin + segment
        part = None if layout is None else layout.slice(begin, end)
        logits = model(tokens[:, begin:end], part, cache=cache)
        cache.truncate(memory)
        yield logits
