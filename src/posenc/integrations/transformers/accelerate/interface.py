"""``attn_implementation="posenc"``: posenc in the attention interface of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.output_capturing import _active_collector

from posenc.attention import attend
from posenc.attention.lowering import repeat_heads
from posenc.attention.softmax import masked_softmax
from posenc.encoding import BucketedTerms
from posenc.errors import ArgumentError
from posenc.integrations.transformers.accelerate.accelerated import settings_of
from posenc.integrations.transformers.accelerate.config import NAME
from posenc.integrations.transformers.accelerate.masks import all_attended, grid_of, visible_pairs
from posenc.integrations.transformers.accelerate.terms import ComputedOnce, encoding_of


@dataclass(eq=False)
class PositionBias(ComputedOnce):
    """A position bias of transformers in structured form, in place of the ``[1, H, Q, K]`` tensor.

    Models hand it from layer to layer.

    Args:
        terms: its terms; () for a bias of zeros.
        compute: the model's own function, which computes the tensor.
    """

    terms: tuple[BucketedTerms, ...] = ()
    compute: Callable[[], Tensor | None] = lambda: None


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: PositionBias | Tensor | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B Q H E"], Tensor | None]:
    """Attention as transformers calls it.

    Args:
        module: the layer; its ``is_causal`` holds where the argument is None.
        attention_mask: ``[B, K]``, False for padding, from ``mask``; or ``[B, 1, Q, K]``, all that
            may be seen (bool) or what is added to the logits.
        position_bias: added to the logits.
        options: ``sliding_window`` is in the mask; ``output_attentions`` makes the weights.

    Returns:
        The output and, if asked for, the weights ``[B, H, Q, K]``.

    Raises:
        ArgumentError: for soft-capped logits, attention sinks and paged caches.
    """
    for name in ("softcap", "s_aux", "cache"):
        if options.get(name) is not None:
            raise ArgumentError(
                "attn_implementation",
                expected=f"one that computes {name}",
                got=NAME,
                remedy="Use 'eager' for this model.",
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    compact = attention_mask is None or attention_mask.dim() == 2
    attended = attention_mask if compact else None
    queries, keys = query.shape[2], key.shape[2]
    grid = grid_of(queries, keys, attended, causal=causal and compact, device=query.device)
    settings = settings_of(module)
    with_weights = wants_weights(module, options)
    fast = compact and not with_weights and keys >= settings.shortest
    if fast and not isinstance(position_bias, Tensor):
        encoding = encoding_of(*(() if position_bias is None else position_bias.terms))
        backend = settings.backend
        output = attend(
            query, key, value, grid, encoding, backend=backend, dropout=dropout, scale=scaling
        )
        return output.transpose(1, 2), None
    bias = position_bias.dense if isinstance(position_bias, PositionBias) else position_bias
    mask = visible_pairs(grid) if compact else attention_mask
    output, weights = dense_attention(
        query, key, value, bias, mask, dropout=dropout, scale=scaling, with_weights=with_weights
    )
    return output.transpose(1, 2), weights


def wants_weights(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """True if a call asks for attention weights: by options, config or the model's call."""
    if options.get("output_attentions"):
        return True
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    return not torch.compiler.is_compiling() and "attentions" in (_active_collector.get() or ())


def dense_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    bias: Float[Tensor, "B H Q K"] | None,
    mask: Tensor | None,
    *,
    dropout: float,
    scale: float | None,
    with_weights: bool,
) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H Q K"] | None]:
    """PyTorch's attention with a bias written out; with weights, attention by its definition."""
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    if not with_weights:
        if bias is not None and mask is not None:
            boolean = mask.dtype == torch.bool
            lowest = torch.finfo(bias.dtype).min
            mask = bias.masked_fill(~mask, lowest) if boolean else bias + mask
        elif bias is not None:
            mask = bias
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
        )
        return output, None
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    if mask is None:
        weights = logits.softmax(-1)
    elif mask.dtype == torch.bool:
        weights = masked_softmax(logits, mask)
    else:
        weights = (logits + mask).softmax(-1)
    weights = drop(weights, dropout)
    return weights @ value, weights


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Bool[Tensor, "B L"] | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask that ``attention`` takes, made as transformers makes masks.

    Returns:
        None or ``[B, K]``, where the mask is causal or full, but for padding, and the queries are
        the last tokens; else ``[B, 1, Q, K]`` bool.
    """
    full = mask_function is bidirectional_mask_function
    last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if use_vmap or not (full or (mask_function is causal_mask_function and last)):
        allowed = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return cast(
            Tensor,
            sdpa_mask(
                batch_size,
                q_length,
                kv_length,
                q_offset,
                kv_offset,
                mask_function,
                attention_mask,
                use_vmap=use_vmap,
                **options | allowed,
            ),
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    return None if all_attended(padding) else padding


def register() -> None:
    """Add the implementation ``"posenc"`` to transformers; also done by importing this package."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


register()
