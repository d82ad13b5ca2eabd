"""LongT5: its decoder, as T5; the encoder attends locally already."""

from transformers.models.longt5.modeling_longt5 import (
    LongT5Attention,
    LongT5LocalAttention,
    LongT5Stack,
    LongT5TransientGlobalAttention,
)

from posenc.transformers.acceleration.families.common.text_bias import T5Bias
from posenc.transformers.acceleration.family import AcceleratedFamily

ENTRY = AcceleratedFamily(
    title="LongT5",
    classes={LongT5Attention: T5Bias},
    configured=(LongT5Stack,),
    unserved={
        LongT5LocalAttention: "it attends to blocks beside each other, in memory linear in length",
        LongT5TransientGlobalAttention: "its keys are blocks beside each other and means of blocks",
    },
)
