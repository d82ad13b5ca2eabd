"""SeamlessM4T v2's encoder of sounds: a vector for each clipped offset."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import (
    SeamlessM4Tv2ConformerEncoder,
    SeamlessM4Tv2ConformerSelfAttention,
)

from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.families.common.conformer import (
    ConformerAttention,
    conformer_family,
    features_and_ids,
    refusal,
)


class SeamlessV2Encoder(Accelerated, SeamlessM4Tv2ConformerEncoder):
    """The encoder, without a mask of all pairs for sounds of one chunk."""

    def _apply_chunk_attention(
        self, attention_mask: Tensor | None, hidden_states: Float[Tensor, "B L C"]
    ) -> Tensor | None:
        if hidden_states.shape[1] <= self.config.speech_encoder_chunk_size:
            return attention_mask
        return super()._apply_chunk_attention(attention_mask, hidden_states)


def _refusal(module: Any) -> str | None:
    if module.config._attn_implementation == "eager":
        return "its eager attention adds 1 to the logits where the mask of chunks lets through"
    return refusal(module)


ENTRY = conformer_family(
    "SeamlessM4T v2",
    SeamlessM4Tv2ConformerSelfAttention,
    SeamlessM4Tv2ConformerEncoder,
    classes={
        SeamlessM4Tv2ConformerSelfAttention: ConformerAttention,
        SeamlessM4Tv2ConformerEncoder: SeamlessV2Encoder,
    },
    refusal=_refusal,
    inputs=features_and_ids,
)
