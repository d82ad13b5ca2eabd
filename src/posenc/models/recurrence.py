"""Transformer-XL's segment recurrence."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Length, Natural, check
from posenc.attention import Cache
from posenc.encoding.tensors import TokenIds
from posenc.layout import Layout
from posenc.models.decoder import Decoder


def in_segments(
    model: Decoder,
    tokens: TokenIds,
    *,
    segment: int,
    memory: int,
    layout: Layout | None = None,
    cache: Cache | None = None,
) -> Iterator[Float[Tensor, "B S V"]]:
    """Logits of each segment in turn, with attention to ``memory`` tokens before it.

    The memory of a layer is its keys and values of the last ``memory`` tokens, with their layout:
    positions continue across segments. It receives no gradient.

    In evaluation, compared with one pass over the whole text:

    - a memory as long as the past gives equal results;
    - with a shorter memory M, a token attends in every layer to its segment so far and the M tokens
      before the segment, so layer n reaches ``n · M`` back. With segments of one token this is
      ``window=M + 1``;
    - a causal convolution (``conv``, ``path``) keeps the tokens it needs from before the memory;
    - absolute positions continue, up to the length of a learned table.

    In training, gradients end at the memory, and its keys come from earlier weights. The paper
    caches the layer's input and projects it again, with gradients to W_K and W_V.

    Args:
        model: any ``Decoder``.
        tokens: ``[B, L]`` ids.
        segment: tokens per segment; the last may be shorter.
        memory: tokens cached by each layer; 0: none.
        layout: of the tokens; by default they continue ``cache``.
        cache: from an earlier call; changed in place.

    Raises:
        ArgumentError: if ``segment`` is below 1 or ``memory`` below 0.
    """
    check("segment", Length, segment)
    check("memory", Natural, memory)
    state = cache or model.new_cache()

    def segments() -> Iterator[Tensor]:
        for begin in range(0, tokens.shape[1], segment):
            end = begin + segment
            part = None if layout is None else layout.slice(begin, end)
            logits = model(tokens[:, begin:end], part, cache=state)
            state.truncate(memory)
            yield logits

    return segments()
