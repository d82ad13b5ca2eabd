"""MPT."""

from __future__ import annotations

from typing import Any

from transformers import MptConfig, MptForCausalLM, MptModel, PreTrainedModel
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from tests.transformers.acceleration.case import VOCABULARY, Case, seeing, texts, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "n_layers": 2,
    "n_heads": 3,
    "max_seq_len": 64,
}


def make(**options: Any) -> PreTrainedModel:
    return MptModel(MptConfig(**SIZES | options))


def clipped() -> PreTrainedModel:
    """A model that clips queries, keys and values, and scales logits by a number of its own."""
    return make(attn_config=MptAttentionConfig(clip_qkv=0.5, softmax_scale=0.3))


CASES = {
    "padded": Case(make, compared=seeing, accelerated=4),
    "whole": Case(make, whole_texts),
    "long": Case(lambda: make(n_layers=1, max_seq_len=600), lambda: texts(600), seeing),
    "power_of_two": Case(lambda: make(n_heads=4), compared=seeing),
    "clipped": Case(clipped, compared=seeing),
    "lm": Case(lambda: MptForCausalLM(MptConfig(**SIZES)), compared=seeing),
}
