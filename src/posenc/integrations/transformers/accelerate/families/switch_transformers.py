"""Switch Transformers: as T5."""

from __future__ import annotations

from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersAttention,
    SwitchTransformersStack,
)

from posenc.integrations.transformers.accelerate.families.common.t5_bias import T5Bias
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class AcceleratedSwitchTransformersAttention(T5Bias, SwitchTransformersAttention):
    """Self- and cross-attention."""

    original = SwitchTransformersAttention


ENTRY = AcceleratedFamily(
    title="Switch Transformers",
    classes={SwitchTransformersAttention: AcceleratedSwitchTransformersAttention},
    configured=(SwitchTransformersStack,),
)
