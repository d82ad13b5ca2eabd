"""mT5: as T5."""

from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Stack

from posenc.transformers.acceleration.families.common.text_bias import T5Bias
from posenc.transformers.acceleration.family import AcceleratedFamily

ENTRY = AcceleratedFamily("mT5", {MT5Attention: T5Bias}, configured=(MT5Stack,))
