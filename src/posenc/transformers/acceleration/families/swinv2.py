"""Swin-v2: cosines of queries and keys in windows, and a network's bias by their offset."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.families.common.images import attend_windows
from posenc.transformers.acceleration.family import AcceleratedFamily


class AcceleratedSwinv2Attention(Accelerated, Swinv2SelfAttention):
    """Attention within windows; as it was in small ones, and in shifted ones inside a graph."""

    def forward(
        self,
        hidden_states: Float[Tensor, "N L C"],
        attention_mask: Float[Tensor, "W L L"] | None = None,
        output_attentions: bool | None = False,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        traced = attention_mask is not None and not has_values(attention_mask)
        if output_attentions or traced or hidden_states.shape[1] < self.shortest:
            inputs = {"attention_mask": attention_mask, "output_attentions": output_attentions}
            return self.original_forward(hidden_states=hidden_states, **inputs, **options)
        layers = self.query, self.key, self.value
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        factor = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()  # [H, 1, 1]
        table = self.continuous_position_bias_mlp(self.relative_coords_table).flatten(0, 2)
        output = attend_windows(
            self,
            (normalize(q, dim=-1) * factor).to(v.dtype),
            normalize(k, dim=-1).to(v.dtype),
            v,
            16 * table.T.sigmoid(),
            None if attention_mask is None else 2 * attention_mask,  # as transformers adds it
            tuple(self.window_size),
            scale=1.0,
            dropout=self.dropout.p,
        )
        return (output,)


ENTRY = AcceleratedFamily(
    title="Swin-v2",
    classes={Swinv2SelfAttention: AcceleratedSwinv2Attention},
    shortest=144,
    limits="shifted windows outside compiled graphs only",
)
