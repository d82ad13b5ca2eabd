"""What models of tokens are trained to make small."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.errors import ArgumentError

__all__ = ["token_loss"]


def token_loss(
    logits: Float[Tensor, "B L V"],
    targets: Int[Tensor, "B L"],
    *,
    valid: Bool[Tensor, "b L"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Cross-entropy in nats a token, against ``(1 - ε) · target + ε / V`` (label smoothing).

    Args:
        logits: ``[B, L, V]``.
        targets: ``[B, L]`` ids.
        valid: ``[B|1, L]``, the tokens that count (a layout's ``valid``, or the masked ones);
            None: all. The mean is over these; 0 if there are none.
        smoothing: ε, 0.1 in Vaswani et al.

    Raises:
        ArgumentError: when ε is out of 0 … 1, or shapes do not fit.

    Reference: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision".
    """
    if not 0.0 <= smoothing < 1.0:
        raise ArgumentError(
            "smoothing", expected="0 ≤ smoothing < 1", got=smoothing, remedy="0.1 is common."
        )
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise ArgumentError(
            "targets",
            expected=f"one id for each of {list(logits.shape[:-1])} places",
            got=list(targets.shape),
            remedy="Shift them by one: the logits at a place are of the token after it.",
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
