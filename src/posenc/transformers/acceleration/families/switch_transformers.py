"""Switch Transformers: as T5."""

from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersAttention,
    SwitchTransformersStack,
)

from posenc.transformers.acceleration.families.common.text_bias import T5Bias
from posenc.transformers.acceleration.family import AcceleratedFamily

ENTRY = AcceleratedFamily(
    "Switch Transformers",
    {SwitchTransformersAttention: T5Bias},
    configured=(SwitchTransformersStack,),
)
