"""Masking tokens for a masked language model to restore."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posenc.errors import ArgumentError

__all__ = ["Masked", "mask_tokens"]


@dataclass(frozen=True, eq=False)
class Masked:
    """A batch with some of its tokens hidden.

    Args:
        inputs: ``[B, L]`` ids, what the model sees.
        chosen: ``[B, L]``, the places it is asked about: ``token_loss(…, valid=chosen)``.
    """

    inputs: Int[Tensor, "B L"]
    chosen: Bool[Tensor, "B L"]


def mask_tokens(
    tokens: Int[Tensor, "B L"],
    *,
    mask_token: int,
    vocabulary: int,
    rate: float = 0.15,
    eligible: Bool[Tensor, "b L"] | None = None,
    generator: torch.Generator | None = None,
) -> Masked:
    """Choose each token with probability ``rate``; of ten chosen ones show eight as the mask
    token, one as any other id, and one as it is.

    Args:
        tokens: ``[B, L]`` ids.
        mask_token: the id that hides a token.
        vocabulary: ids to draw the others from: 0 … vocabulary - 1.
        rate: see above.
        eligible: ``[B|1, L]``, tokens that may be chosen (a layout's ``valid``); None: all.
        generator: source of randomness, on the CPU; the global one by default.

    Raises:
        ArgumentError: when ``rate`` is no probability.

    Reference: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers".
    """
    if not 0.0 < rate <= 1.0:
        raise ArgumentError("rate", expected="0 < rate ≤ 1", got=rate, remedy="0.15 is BERT's.")

    def draw() -> Tensor:
        return torch.rand(tokens.shape, generator=generator).to(tokens.device)

    chosen, fate = draw() < rate, draw()
    others = (draw() * vocabulary).long().clamp(max=vocabulary - 1)
    if eligible is not None:
        chosen = chosen & eligible
    inputs = torch.where(chosen & (fate < 0.8), mask_token, tokens)
    inputs = torch.where(chosen & (fate >= 0.9), others, inputs)
    return Masked(inputs, chosen)
