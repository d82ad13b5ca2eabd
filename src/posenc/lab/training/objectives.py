"""Objectives of token models: their training loss, and the tokens that masked models predict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.arguments import Fraction, Probability, check
from posenc.encoding.tensors import TokenIds
from posenc.errors import ArgumentError


def token_loss(
    logits: Float[Tensor, "B L V"],
    targets: TokenIds,
    *,
    valid: Bool[Tensor, "b L"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Cross-entropy in nats per token, against ``(1 - ε) · target + ε / V`` (label smoothing).

    Args:
        logits: ``[B, L, V]``.
        targets: ``[B, L]`` ids.
        valid: ``[B|1, L]``, tokens to average over (a layout's ``valid``, or the masked
            ones); None: all. The loss is 0 if there are none.
        smoothing: ε, 0.1 in Vaswani et al.

    Raises:
        ArgumentError: unless 0 ≤ ε < 1 and shapes match.

    Reference: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision".
    """
    check("smoothing", Probability, smoothing, 0.0)
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise ArgumentError(
            "targets",
            expected=f"ids of shape {list(logits.shape[:-1])}, as the logits have",
            got=list(targets.shape),
            remedy="Shift them by one: logits predict the next token.",
        )
    if valid is not None:
        counted = valid.expand_as(targets)
        logits, targets = logits[counted], targets[counted]
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        targets.reshape(-1),
        label_smoothing=smoothing,
        reduction="sum",
    )
    return losses / max(1, targets.numel())


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
    check("rate", Fraction, rate, 0.15)

    def draw() -> Tensor:
        return torch.rand(tokens.shape, generator=generator).to(tokens.device)

    chosen, fate = draw() < rate, draw()
    others = (draw() * vocabulary).long().clamp(max=vocabulary - 1)
    if eligible is not None:
        chosen = chosen & eligible
    inputs = torch.where(chosen & (fate < 0.8), mask_token, tokens)
    inputs = torch.where(chosen & (fate >= 0.9), others, inputs)
    return Masked(inputs, chosen)
