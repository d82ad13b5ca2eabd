"""Token masking for masked language models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from posenc.encoding.tensors import TokenIds
from posenc.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Masked:
    """A batch with masked tokens.

    Args:
        inputs: ``[B, L]`` ids for the model.
        chosen: ``[B, L]``, positions to predict: ``token_loss(…, valid=chosen)``.
    """

    inputs: TokenIds
    chosen: Bool[Tensor, "B L"]


def mask_tokens(
    tokens: TokenIds,
    *,
    mask_token: int,
    vocabulary: int,
    rate: float = 0.15,
    eligible: Bool[Tensor, "b L"] | None = None,
    generator: torch.Generator | None = None,
) -> Masked:
    """Choose each token with probability ``rate``; replace 80 % of these by the mask token and 10 %
    by a random id, keep 10 %.

    Args:
        tokens: ``[B, L]`` ids.
        mask_token: id of the mask token.
        vocabulary: random ids are 0 … vocabulary - 1.
        eligible: ``[B|1, L]``, tokens that may be chosen (a layout's ``valid``); None: all.
        generator: on the CPU; the global one by default.

    Raises:
        ArgumentError: unless 0 < ``rate`` ≤ 1.

    Reference: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers".
    """
    if not 0.0 < rate <= 1.0:
        raise ArgumentError("rate", expected="0 < rate ≤ 1", got=rate, remedy="BERT uses 0.15.")

    def draw() -> Tensor:
        return torch.rand(tokens.shape, generator=generator).to(tokens.device)

    chosen, fate = draw() < rate, draw()
    others = (draw() * vocabulary).long().clamp(max=vocabulary - 1)
    if eligible is not None:
        chosen = chosen & eligible
    inputs = torch.where(chosen & (fate < 0.8), mask_token, tokens)
    inputs = torch.where(chosen & (fate >= 0.9), others, inputs)
    return Masked(inputs, chosen)
