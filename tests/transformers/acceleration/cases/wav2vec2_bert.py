"""Wav2Vec2-BERT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Wav2Vec2BertConfig, Wav2Vec2BertModel

from tests.transformers.acceleration.case import AUDIO, VOCABULARY, Case, texts

SIZES: dict[str, Any] = AUDIO | {
    "vocab_size": VOCABULARY,
    "feature_projection_input_dim": 10,
    "position_embeddings_type": "relative_key",
    "left_max_position_embeddings": 5,
    "right_max_position_embeddings": 3,
    "conv_depthwise_kernel_size": 3,
}


def make(**options: Any) -> PreTrainedModel:
    return Wav2Vec2BertModel(Wav2Vec2BertConfig(**SIZES | options))


def features() -> dict[str, Tensor]:
    """Two rows of features, padded on either side."""
    generator = torch.Generator().manual_seed(1)
    attended = texts()["attention_mask"]
    values = torch.randn(*attended.shape, 10, generator=generator)
    return {"input_features": values, "attention_mask": attended}


CASES = {
    "relative_key": Case(make, features, accelerated=2),
    "whole": Case(make, lambda: {"input_features": features()["input_features"]}),
    "eager": Case(lambda: make(attn_implementation="eager"), features),
    "long_reach": Case(
        lambda: make(left_max_position_embeddings=64, right_max_position_embeddings=8), features
    ),
    "relative": Case(lambda: make(position_embeddings_type="relative"), features),
    "adapter": Case(
        lambda: make(add_adapter=True, use_intermediate_ffn_before_adapter=True),
        features,
        accelerated=2,
    ),
}
