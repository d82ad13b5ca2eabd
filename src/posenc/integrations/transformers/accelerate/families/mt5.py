"""mT5: as T5."""

from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Stack

from posenc.integrations.transformers.accelerate.families.common.t5_bias import T5Bias
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily

ENTRY = AcceleratedFamily("mT5", {MT5Attention: T5Bias}, configured=(MT5Stack,))
