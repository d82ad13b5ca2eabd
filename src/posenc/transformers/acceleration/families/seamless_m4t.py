"""SeamlessM4T's encoder of sounds: Transformer-XL's relative positions."""

from transformers.models.seamless_m4t.modeling_seamless_m4t import (
    SeamlessM4TConformerEncoder,
    SeamlessM4TConformerSelfAttention,
)

from posenc.transformers.acceleration.families.common.conformer import (
    conformer_family,
    features_and_ids,
)

ENTRY = conformer_family(
    "SeamlessM4T",
    SeamlessM4TConformerSelfAttention,
    SeamlessM4TConformerEncoder,
    inputs=features_and_ids,
)
