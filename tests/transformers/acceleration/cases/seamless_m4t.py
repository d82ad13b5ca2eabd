"""SeamlessM4T."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, SeamlessM4TConfig, SeamlessM4TForSpeechToText
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder

from tests.transformers.acceleration.case import VOCABULARY, Case, texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "feature_projection_input_dim": 10,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 3,
    "speech_encoder_intermediate_size": 32,
    "speech_encoder_layerdrop": 0.0,
    "encoder_layers": 1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "encoder_layerdrop": 0.0,
    "decoder_layers": 1,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 32,
    "decoder_layerdrop": 0.0,
    "conv_depthwise_kernel_size": 3,
    "max_position_embeddings": 64,
    "max_source_positions": 64,
}


def make(**options: Any) -> PreTrainedModel:
    return SeamlessM4TSpeechEncoder(SeamlessM4TConfig(**SIZES | options))


def features() -> dict[str, Tensor]:
    """Two rows of features, one of them padded."""
    values = torch.randn(2, 23, 10, generator=torch.Generator().manual_seed(1))
    attended = torch.ones(2, 23, dtype=torch.long)
    attended[1, -6:] = 0
    return {"input_features": values, "attention_mask": attended}


def whole_features() -> dict[str, Tensor]:
    return {"input_features": features()["input_features"]}


def dictation() -> dict[str, Tensor]:
    """Features, and texts to be generated."""
    return features() | {"decoder_input_ids": texts(9)["input_ids"]}


CASES = {
    "sdpa": Case(make, features, accelerated=2),
    "eager": Case(lambda: make(attn_implementation="eager"), features, accelerated=2),
    "whole": Case(make, whole_features, accelerated=2),
    "few_positions": Case(lambda: make(max_source_positions=7), features, accelerated=2),
    "speech_to_text": Case(
        lambda: SeamlessM4TForSpeechToText(SeamlessM4TConfig(**SIZES)), dictation, accelerated=2
    ),
}
