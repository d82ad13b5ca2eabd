"""Training loss of token models."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

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
    if not 0.0 <= smoothing < 1.0:
        raise ArgumentError(
            "smoothing", expected="0 ≤ smoothing < 1", got=smoothing, remedy="0.1 is common."
        )
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
