"""``attn_implementation="posenc"``: posenc in the attention interface of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.output_capturing import _active_collector

from posenc.attention import attend
from posenc.attention.problem.lowering import repeat_heads
from posenc.attention.softmax import masked_softmax
from posenc.derivatives import with_definition
from posenc.encoding import BucketedTerms
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.integrations.transformers.accelerate.accelerated import settings_of
from posenc.integrations.transformers.accelerate.config import (
    CAUSAL_KEYS,
    KEYS,
    NAME,
    takes_added_masks,
)
from posenc.integrations.transformers.accelerate.lazy_mask import (
    Pairs,
    carrying,
    pairs_behind,
    written_out,
)
from posenc.integrations.transformers.accelerate.masks import all_attended, grid_of
from posenc.integrations.transformers.accelerate.terms import ComputedOnce, encoding_of
from posenc.runtime import is_scripted

IGNORED = frozenset(
    {
        *("deterministic", "position_ids", "sliding_window"),
        *("cache_position", "grid_thw", "logits_to_keep", "num_items_in_batch", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)
"""Options that say nothing about attention beyond the mask; models hand on what they are called
with."""


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
        module: the layer.
        attention_mask: from ``mask``; ``[B, 1, Q, K]``, all that may be seen (bool) or what is
            added to the logits; ``[B, K]``, False for padding; or None, where all is seen.
        is_causal: True is refused without a mask; else the mask has it, as in eager attention.
        position_bias: added to the logits.
        options: ``output_attentions`` makes the weights; ``IGNORED`` are not read.

    Returns:
        The output, contiguous, and, if asked for, the weights ``[B, H, Q, K]``.

    Raises:
        ArgumentError: for any other option that is not None, such as soft-capped logits
            (``softcap``), attention sinks (``s_aux``) and paged caches (``cache``); for
            ``is_causal=True`` without a mask.
    """
    for name, option in options.items():
        if option is not None and name not in IGNORED:
            raise ArgumentError(
                name,
                expected="None, since posenc's attention does not read it",
                got=type(option).__name__,
                remedy="Use attn_implementation='eager' for this model.",
            )
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and attention_mask is None and queries > 1:
        raise ArgumentError(
            "attention_mask",
            expected="a mask beside is_causal=True, which does not say which tokens queries are",
            got=None,
            remedy="Make one by transformers' create_causal_mask.",
        )
    grid: Grid | None = None
    if attention_mask is None or attention_mask.dim() == 2:
        grid = grid_of(queries, keys, attention_mask, device=query.device)
    elif attention_mask.shape[2:] == (queries, keys):
        pairs = pairs_behind(attention_mask)
        grid = None if pairs is None else pairs.grid
    settings = settings_of(module)
    with_weights = wants_weights(module, options)
    fast = not with_weights and keys >= settings.shortest
    if fast and grid is not None and not isinstance(position_bias, Tensor):
        encoding = encoding_of(*(() if position_bias is None else position_bias.terms))
        backend = settings.backend
        output = attend(
            query, key, value, grid, encoding, backend=backend, dropout=dropout, scale=scaling
        )
        return output.transpose(1, 2).contiguous(), None
    bias = position_bias.dense if isinstance(position_bias, PositionBias) else position_bias
    mask = written_out(attention_mask)
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    elif mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)  # which autocast has made another
    output, weights = dense_attention(
        query, key, value, bias, mask, dropout=dropout, scale=scaling, with_weights=with_weights
    )
    return output.transpose(1, 2).contiguous(), weights


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
    """PyTorch's attention with a bias written out; with weights, attention by its definition.

    So too in exported programs that train the bias: to ONNX, those with PyTorch's kernel fail.
    """
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    exported = torch.compiler.is_exporting() and bias is not None and bias.requires_grad
    if with_weights or exported:
        output, weights = _by_definition(query, key, value, bias, mask, dropout, scale)
        return output, weights if with_weights else None
    if bias is not None and mask is not None:
        boolean = mask.dtype == torch.bool
        lowest = torch.finfo(bias.dtype).min
        mask = bias.masked_fill(~mask, lowest) if boolean else bias + mask
    elif bias is not None:
        mask = bias
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    if dropout:  # of which the definition would draw another mask
        return output, None

    def definition(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        return _by_definition(q, k, v, None, masks[0] if masks else None, 0.0, scale)[0]

    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    return with_definition(output, definition, tensors), None


def _by_definition(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    bias: Float[Tensor, "B H Q K"] | None,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q K"]]:
    """The output and the weights."""
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
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Shaped[Tensor, "B 1 Q K"]:
    """The mask that ``attention`` takes, made as transformers makes masks, and never None.

    Models that read it find the one of ``"sdpa"``, or of ``"eager"`` if they lack that.

    Raises:
        ArgumentError: for a model whose attention is not on transformers' attention interface.
    """
    if not takes_added_masks(config):
        dtype = torch.bool
    pairs = pairs_of(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        device=device,
        **options,
    )
    shape = batch_size, 1, q_length, kv_length
    return carrying(pairs, shape, dtype, torch.device(device))


def pairs_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Bool[Tensor, "B L"] | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Pairs:
    """The pairs that a mask of transformers lets through.

    Their grid is known if they are causal or full, but for padding: by the mask's function, since
    layers and options say otherwise in some models.
    """

    def visible() -> Tensor:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made: Any = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            device=device,
            **options | skips,
        )
        return cast(Tensor, made)

    causal = mask_function is causal_mask_function
    known = causal or mask_function is bidirectional_mask_function
    if is_scripted() or not known or isinstance(q_offset, Tensor):  # as of a static cache
        pairs = visible()
        return Pairs(None, lambda: pairs)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    grid = grid_of(
        q_length,
        kv_length,
        None if all_attended(padding) else padding,
        causal=causal,
        device=device,
        starts=(q_offset, kv_offset),
    )
    return Pairs(grid, visible)


def keys_mask(causal: bool) -> Callable[..., Bool[Tensor, "B *pairs"] | None]:
    """Masks for accelerated modules that are causal themselves, or see all keys themselves.

    Returns:
        A function that makes a mask: ``[B, K]``, False for padding, or None without padding, if
        that and ``causal`` is all it says of the last tokens; else ``[B, 1, Q, K]``.
    """

    def made(
        *arguments: Any, dtype: Any = None, config: Any = None, **options: Any
    ) -> Tensor | None:
        pairs = pairs_of(*arguments, **options)
        grid = pairs.grid
        if grid is not None and grid.causal == causal:
            last = grid.shift == grid.query.length - grid.key.length
            if last or not causal:
                return grid.key.valid
        return cast(Tensor, pairs.dense)

    return made


def register() -> None:
    """Add the implementation ``"posenc"`` to transformers; also done by importing this package."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    for name, causal in ((KEYS, False), (CAUSAL_KEYS, True)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, keys_mask(causal))


register()
