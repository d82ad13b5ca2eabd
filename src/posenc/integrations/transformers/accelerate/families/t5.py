"""T5: a table of logits by bucket instead of a bias for each pair; cross-attention without one."""

from __future__ import annotations

from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from posenc.integrations.transformers.accelerate.families.common.t5_bias import T5Bias
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class AcceleratedT5Attention(T5Bias, T5Attention):
    """Self- and cross-attention of T5."""

    original = T5Attention


ENTRY = AcceleratedFamily(
    title="T5", classes={T5Attention: AcceleratedT5Attention}, configured=(T5Stack,)
)
