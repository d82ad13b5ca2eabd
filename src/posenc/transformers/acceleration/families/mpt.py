"""MPT: ALiBi."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, MptModel

from posenc.transformers.acceleration.accelerated import Accelerated, wants_weights
from posenc.transformers.acceleration.families.common.text_bias import attend_alibi
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.interface import keys_mask
from posenc.transformers.acceleration.masks import grid_of

MASKS = "posenc_mpt"
causal_keys = keys_mask(causal=True)


def hidden_keys(*arguments: Any, **options: Any) -> Bool[Tensor, "..."]:
    """A mask that is True for what is hidden, and never None: the model converts its dtype.

    Returns:
        ``[0]`` without padding and ``[B, K]`` with it under causal masks; else ``[B, 1, Q, K]``.
    """
    visible = causal_keys(*arguments, **options)
    return (
        torch.zeros(0, dtype=torch.bool, device=options["device"]) if visible is None else ~visible
    )


AttentionMaskInterface.register(MASKS, hidden_keys)


class MptAlibi(Accelerated, MptAttention):
    """Attention whose masks are those of ``hidden_keys``."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        position_bias: Float[Tensor, "H 1 L"],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        queries = hidden_states.shape[1]
        keys = queries + (0 if cache is None else int(cache.get_seq_length(self.layer_idx)))
        unserved = keys < self.shortest or keys > position_bias.shape[-1]
        if unserved or attention_mask is None or attention_mask.dim() > 2:
            if attention_mask is not None:
                attention_mask = hidden_pairs(attention_mask, queries, keys)
            inputs = {"position_bias": position_bias, "attention_mask": attention_mask}
            return self.original_forward(
                hidden_states=hidden_states, cache=cache, **inputs, **options
            )
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        bias = position_bias[:, 0, -keys:].unsqueeze(0)
        attended = ~attention_mask if attention_mask.dim() == 2 else None
        dropped, scale = self.attn_dropout_p, self.softmax_scale
        output = attend_alibi(self, q, k, v, bias, attended, dropout=dropped, scale=scale)
        return self.out_proj(output), None


class AcceleratedMptBlock(Accelerated, MptBlock):
    """A block, the only module that gets the option to return weights."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        attention_mask: Tensor,
        cache: Any = None,
        **options: Any,
    ) -> Any:
        if wants_weights(self, options):
            queries, index = hidden_states.shape[1], self.attn.layer_idx
            keys = queries + (0 if cache is None else int(cache.get_seq_length(index)))
            attention_mask = hidden_pairs(attention_mask, queries, keys)
        inputs = {"hidden_states": hidden_states, "attention_mask": attention_mask}
        return self.original_forward(cache=cache, **inputs, **options)


def hidden_pairs(hidden: Bool[Tensor, "..."], queries: int, keys: int) -> Bool[Tensor, "b 1 Q K"]:
    """A mask of ``hidden_keys`` for all pairs."""
    if hidden.dim() > 2:
        return hidden
    attended = ~hidden if hidden.dim() == 2 else None
    return ~grid_of(queries, keys, attended, causal=True, device=hidden.device).visible


ENTRY = AcceleratedFamily(
    title="MPT",
    classes={MptAttention: MptAlibi, MptBlock: AcceleratedMptBlock},
    configured=(MptModel,),
    masks=MASKS,
)
