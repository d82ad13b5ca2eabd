"""Falcon with ALiBi (falcon-rw)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel

from posenc.transformers.acceleration.accelerated import (
    CAUSAL_KEYS,
    Accelerated,
    config_behind,
    wants_weights,
)
from posenc.transformers.acceleration.families.common.text_bias import attend_alibi
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.masks import added_causal_mask


class FalconAlibi(Accelerated, FalconAttention):
    """Attention whose masks are those of posenc."""

    config = property(lambda module: config_behind(module.__dict__["config"]))
    """The model's config, by which the original attention chooses its implementation."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        alibi: Float[Tensor, "b ..."],
        attention_mask: Tensor | None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, queries = hidden_states.shape[:2]
        bias = alibi.reshape(batch, self.num_heads, -1) * self.inv_norm_factor
        pairs = attention_mask is not None and attention_mask.dim() > 2
        if pairs or bias.shape[-1] < self.shortest or wants_weights(self, options):
            if not pairs:  # the model has the bias in its masks
                mask = added_causal_mask(
                    attention_mask, queries, bias.shape[-1], like=hidden_states
                )
                lowest = torch.finfo(mask.dtype).min
                attention_mask = bias.unsqueeze(2).masked_fill(mask < 0, lowest)
            inputs = {"alibi": alibi, "attention_mask": attention_mask}
            return self.original_forward(
                hidden_states=hidden_states, cache=cache, **inputs, **options
            )
        qkv = self._split_heads(self.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in qkv)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # Eager attention adds the bias to the logits and the mask, which has it already.
        times = 1 if self.config._attn_implementation == "sdpa" else 2
        bias, dropped, scale = bias * times, self.attention_dropout.p, self.inv_norm_factor
        output = attend_alibi(self, q, k, v, bias, attention_mask, dropout=dropped, scale=scale)
        return self.dense(output), None


def _refusal(module: nn.Module) -> str | None:
    config: Any = module.config
    if config.alibi:
        return None
    return "its positions are rotary; PyTorch's attention computes them as fast"


ENTRY = AcceleratedFamily(
    title="Falcon with ALiBi",
    classes={FalconAttention: FalconAlibi},
    configured=(FalconModel,),
    masks=CAUSAL_KEYS,
    refusal=_refusal,
)
