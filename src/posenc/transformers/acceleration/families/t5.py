"""T5: a table of logits by bucket instead of a bias for each pair; cross-attention without one."""

from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from posenc.transformers.acceleration.families.common.text_bias import T5Bias
from posenc.transformers.acceleration.family import AcceleratedFamily

ENTRY = AcceleratedFamily("T5", {T5Attention: T5Bias}, configured=(T5Stack,), shortest=256)
