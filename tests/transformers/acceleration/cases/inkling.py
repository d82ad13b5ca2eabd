"""Inkling."""

from __future__ import annotations

from typing import Any

from transformers import (
    InklingConfig,
    InklingForCausalLM,
    InklingForConditionalGeneration,
    InklingTextConfig,
    InklingTextModel,
    PreTrainedModel,
)

from tests.transformers.acceleration.case import VOCABULARY, Case, seeing, texts, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "dense"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 6,
    "d_rel": 5,
    "rel_extent": 12,
    "sliding_window_size": 9,
    "log_scaling_n_floor": 9,
    "log_scaling_alpha": 0.6,
}


def make(**options: Any) -> PreTrainedModel:
    return InklingTextModel(InklingTextConfig(**SIZES | options))


def multimodal() -> PreTrainedModel:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    config = InklingConfig(
        text_config=SIZES,
        vision_config=vision,
        audio_config={"n_mel_bins": 2, "mel_vocab_size": 4},
        image_token_id=1,
        audio_token_id=2,
    )
    return InklingForConditionalGeneration(config)


CASES = {
    "padded": Case(make, compared=seeing, accelerated=4),
    "whole": Case(make, whole_texts),
    "eager": Case(lambda: make(attn_implementation="eager"), whole_texts),
    "padded_eager": Case(lambda: make(attn_implementation="eager"), compared=seeing),
    "long": Case(lambda: make(sliding_window_size=70, rel_extent=100), lambda: texts(600), seeing),
    "without_temperature": Case(lambda: make(log_scaling_n_floor=None), compared=seeing),
    "experts": Case(
        lambda: make(
            mlp_layer_types=["dense", "sparse"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
        compared=seeing,
    ),
    "lm": Case(lambda: InklingForCausalLM(InklingTextConfig(**SIZES)), compared=seeing),
    "multimodal": Case(multimodal, compared=seeing),
}
