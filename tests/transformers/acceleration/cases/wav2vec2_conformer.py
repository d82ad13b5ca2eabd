"""Wav2Vec2-Conformer."""

from __future__ import annotations

from typing import Any

from transformers import (
    PreTrainedModel,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerForCTC,
    Wav2Vec2ConformerModel,
)

from tests.transformers.acceleration.case import AUDIO, VOCABULARY, Case, sounds, whole_sounds

SIZES: dict[str, Any] = AUDIO | {
    "vocab_size": VOCABULARY,
    "position_embeddings_type": "relative",
    "conv_depthwise_kernel_size": 3,
}


def make(**options: Any) -> PreTrainedModel:
    return Wav2Vec2ConformerModel(Wav2Vec2ConformerConfig(**SIZES | options))


CASES = {
    "sdpa": Case(make, sounds, accelerated=2),
    "eager": Case(lambda: make(attn_implementation="eager"), sounds),
    "whole": Case(make, whole_sounds),
    "few_positions": Case(lambda: make(max_source_positions=7), sounds),
    "adapter": Case(lambda: make(add_adapter=True), sounds, accelerated=2),
    "ctc": Case(lambda: Wav2Vec2ConformerForCTC(Wav2Vec2ConformerConfig(**SIZES)), sounds),
}
