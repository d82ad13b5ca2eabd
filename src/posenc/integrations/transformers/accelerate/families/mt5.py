"""mT5: as T5."""

from __future__ import annotations

from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Stack

from posenc.integrations.transformers.accelerate.families.common.t5_bias import T5Bias
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class AcceleratedMT5Attention(T5Bias, MT5Attention):
    """Self- and cross-attention."""

    original = MT5Attention


ENTRY = AcceleratedFamily(
    title="mT5", classes={MT5Attention: AcceleratedMT5Attention}, configured=(MT5Stack,)
)
