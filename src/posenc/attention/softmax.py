"""Softmax over visible keys."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from posenc.attention.backends.common.base import Result


def masked_softmax(
    logits: Float[Tensor, "*dims Q K"], visible: Bool[Tensor, "*masks Q K"]
) -> Float[Tensor, "*dims Q K"]:
    """Softmax over the visible keys; a row that sees nothing gives zeros, and zero gradients.

    Args:
        logits: ``[..., Q, K]``.
        visible: broadcastable to it, False where a key is hidden.
    """
    hidden = ~visible
    lowest = torch.finfo(logits.dtype).min
    weights = torch.softmax(logits.masked_fill(hidden, lowest), dim=-1)
    return weights.masked_fill(hidden, 0.0)


def softmax_with_sinks(
    logits: Float[Tensor, "B H Q K"],
    visible: Bool[Tensor, "*masks Q K"] | None,
    sinks: Tensor | None,
) -> Float[Tensor, "B H Q K"]:
    """Softmax over the visible keys (None: over all) and a sink, whose weight is dropped.

    Args:
        logits: ``[B, H, Q, K]``.
        visible: as of ``masked_softmax``.
        sinks: ``[H]``, a logit more in each row of a head.
    """
    if sinks is not None:
        column = sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
        visible = None if visible is None else pad(visible, (0, 1), value=True)
    weights = logits.softmax(-1) if visible is None else masked_softmax(logits, visible)
    return weights if sinks is None else weights[..., :-1]


def log_add_exp(a: Float[Tensor, "*dims"], b: Float[Tensor, "*#dims"]) -> Float[Tensor, "*dims"]:
    """``log(e^a + e^b)``; -inf, with gradients of zero, where both are.

    ``torch.logaddexp`` has second derivatives of NaN where the two are far apart.
    """
    nothing = a.isneginf() & b.isneginf()
    both = torch.stack([a.masked_fill(nothing, 0.0), b.expand_as(a)])
    return both.logsumexp(0).masked_fill(nothing, -torch.inf)


def add_sinks(result: Result, sinks: Float[Tensor, " H"] | None, *, lse: bool) -> Result:
    """Attention with sinks, from output and LSE without them; returns the LSE if ``lse``."""
    if sinks is None:
        return result if lse else result._replace(lse=None)
    assert result.lse is not None
    sinks = sinks.to(result.lse.dtype).unsqueeze(-1)
    of_keys = result.lse.clamp(min=torch.finfo(result.lse.dtype).min)  # no -inf - -inf
    weight = (of_keys - sinks).sigmoid().unsqueeze(-1)  # of all keys together
    output = (result.output * weight).to(result.output.dtype)
    return Result(output, log_add_exp(result.lse, sinks) if lse else None)
