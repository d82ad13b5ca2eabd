"""T5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5EncoderModel, T5Model

from tests.transformers.acceleration.case import VOCABULARY, Case, texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}


def make(**options: Any) -> PreTrainedModel:
    return T5Model(T5Config(**SIZES | options))


def pairs() -> dict[str, Tensor]:
    """Two texts, and the texts to be generated, one of them padded."""
    inputs = texts()
    generated = inputs["input_ids"].flip(1)[:, :11]
    attended = torch.ones_like(generated)
    attended[1, 7:] = 0
    return inputs | {"decoder_input_ids": generated, "decoder_attention_mask": attended}


CASES = {
    "eager": Case(lambda: make(attn_implementation="eager"), pairs, accelerated=6),
    "sdpa": Case(lambda: make(attn_implementation="sdpa"), pairs),
    "encoder": Case(lambda: T5EncoderModel(T5Config(**SIZES)), accelerated=2),
    "many_buckets": Case(
        lambda: make(relative_attention_num_buckets=32, relative_attention_max_distance=64), pairs
    ),
}
