"""Bloom: ALiBi."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel

from posenc.transformers.acceleration.accelerated import CAUSAL_KEYS, Accelerated, wants_weights
from posenc.transformers.acceleration.families.common.text_bias import attend_alibi
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.masks import added_causal_mask


class BloomAlibi(Accelerated, BloomAttention):
    """Attention whose masks are those of posenc."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        residual: Float[Tensor, "B Q C"],
        alibi: Float[Tensor, "BH 1 K"],
        attention_mask: Tensor | None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        queries, keys = hidden_states.shape[1], alibi.shape[-1]
        pairs = attention_mask is not None and attention_mask.dim() > 2
        if pairs or keys < self.shortest or wants_weights(self, options):
            mask = added_causal_mask(attention_mask, queries, keys, like=hidden_states)
            inputs = {"residual": residual, "alibi": alibi, "attention_mask": mask}
            return self.original_forward(
                hidden_states=hidden_states, cache=cache, **inputs, **options
            )
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        bias = alibi.reshape(-1, self.num_heads, keys)
        dropped, scale = self.attention_dropout.p, self.inv_norm_factor
        output = attend_alibi(self, q, k, v, bias, attention_mask, dropout=dropped, scale=scale)
        output = dropout(self.dense(output), self.hidden_dropout, self.training)
        return residual + output, None


def _refusal(module: nn.Module) -> str | None:
    settings: Any = getattr(module, "config", module)
    if settings.pretraining_tp > 1 and settings.slow_but_exact:
        return "slow_but_exact asks for the sums of its own projection"
    return None


ENTRY = AcceleratedFamily(
    title="Bloom",
    classes={BloomAttention: BloomAlibi},
    configured=(BloomModel,),
    masks=CAUSAL_KEYS,
    refusal=_refusal,
)
