"""Attention with a mask or a bias written out for all pairs, or with neither."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import dropout as drop

from posenc.attention.backends.common.fused import fused_attention
from posenc.attention.softmax import softmax_with_sinks
from posenc.encoding import repeat_heads
from posenc.encoding.derivatives import with_definition
from posenc.runtime import is_exporting


def dense_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    bias: Float[Tensor, "B H Q K"] | None,
    mask: Tensor | None,
    *,
    dropout: float,
    scale: float | None,
    with_weights: bool = False,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H Q K"] | None]:
    """PyTorch's attention with a bias written out; with weights, attention by its definition.

    So too in exported programs that train the bias: to ONNX, those with PyTorch's kernel fail.

    Args:
        causal: a query attends to keys up to its own index; only without a mask and a bias.
        softcap, sinks: as of ``attend``.
    """
    exported = is_exporting() and bias is not None and bias.requires_grad
    if with_weights or exported or softcap is not None or sinks is not None:
        if causal:
            mask = mask_of_causality(query, key)
        logits = logits_of(query, key, bias, scale)
        output, weights = attend_by_logits(
            logits, value, mask, dropout=dropout, softcap=softcap, sinks=sinks
        )
        return output, weights if with_weights else None
    if bias is not None and mask is not None:
        boolean = mask.dtype == torch.bool
        lowest = torch.finfo(bias.dtype).min
        mask = bias.masked_fill(~mask, lowest) if boolean else bias + mask
    elif bias is not None:
        mask = bias
    output = fused_attention(query, key, value, mask, causal=causal, dropout=dropout, scale=scale)
    if dropout:  # of which the definition would draw another mask
        return output, None

    def definition(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        visible = masks[0] if masks else mask_of_causality(q, k) if causal else None
        return attend_by_logits(logits_of(q, k, None, scale), v, visible, dropout=0.0)[0]

    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    return with_definition((output,), definition, tensors)[0], None


def mask_of_causality(query: Tensor, key: Tensor) -> Tensor:
    """True where the key's index is not above the query's, ``[1, 1, Q, K]``."""
    pairs = query.shape[2], key.shape[2]
    return torch.ones(pairs, dtype=torch.bool, device=query.device).tril()[None, None]


def logits_of(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    bias: Float[Tensor, "B H Q K"] | None,
    scale: float | None,
) -> Float[Tensor, "B H Q K"]:
    """Logits by their definition."""
    key = repeat_heads(key, query.shape[1])
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return logits if bias is None else logits + bias


def attend_by_logits(
    logits: Float[Tensor, "B H Q K"],
    value: Float[Tensor, "B G K D"],
    mask: Tensor | None,
    *,
    dropout: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q K"]]:
    """The output and the weights.

    Args:
        mask: True for keys that are seen, or added to the logits.
        softcap, sinks: as of ``attend``.
    """
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        logits, mask = logits + mask, None
    weights = drop(softmax_with_sinks(logits, mask, sinks).to(value.dtype), dropout)
    return weights @ repeat_heads(value, logits.shape[1]), weights
