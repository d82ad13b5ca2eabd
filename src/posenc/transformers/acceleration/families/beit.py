"""BEiT: a number for each head and offset between patches, and three for the class token."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.models.beit.modeling_beit import BeitAttention, BeitRelativePositionBias

from posenc.transformers.acceleration.accelerated import Accelerated, wants_weights
from posenc.transformers.acceleration.families.common.images import (
    ImageBias,
    ImageBiasTable,
    attend_images,
)
from posenc.transformers.acceleration.family import AcceleratedFamily


class AcceleratedBeitAttention(Accelerated, BeitAttention):
    """Attention that takes an ``ImageBias``; with others, and with dropout, it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | ImageBias | None = None,
        **options: Any,
    ) -> Any:
        bias, dropped = attention_mask, self.training and self.attention_dropout > 0
        if not isinstance(bias, ImageBias) or dropped or wants_weights(self, options):
            mask = bias.dense if isinstance(bias, ImageBias) else bias
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=mask, **options
            )
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        return self.o_proj(attend_images(self, q, k, v, bias, self.scaling)), None


ENTRY = AcceleratedFamily(
    title="BEiT",
    classes={BeitRelativePositionBias: ImageBiasTable, BeitAttention: AcceleratedBeitAttention},
    limits="without dropout of weights",
)
