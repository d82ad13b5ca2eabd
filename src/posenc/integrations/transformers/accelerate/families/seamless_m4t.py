"""SeamlessM4T's encoder of sounds: Transformer-XL's relative positions."""

from __future__ import annotations

from transformers.models.seamless_m4t.modeling_seamless_m4t import (
    SeamlessM4TConformerEncoder,
    SeamlessM4TConformerSelfAttention,
)

from posenc.integrations.transformers.accelerate.config import KEYS
from posenc.integrations.transformers.accelerate.families.common.conformer import (
    ConformerAttention,
    features_and_ids,
    refusal,
)
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class SeamlessAttention(ConformerAttention, SeamlessM4TConformerSelfAttention):
    """Self-attention of a conformer block."""

    original = SeamlessM4TConformerSelfAttention


ENTRY = AcceleratedFamily(
    title="SeamlessM4T",
    classes={SeamlessM4TConformerSelfAttention: SeamlessAttention},
    configured=(SeamlessM4TConformerEncoder,),
    masks=KEYS,
    refusal=refusal,
    inputs=features_and_ids,
)
