"""Falcon with ALiBi."""

from __future__ import annotations

from typing import Any

from transformers import FalconConfig, FalconForCausalLM, FalconModel, PreTrainedModel

from tests.transformers.acceleration.case import VOCABULARY, Case, seeing, texts, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "alibi": True,
    "multi_query": False,
    "attn_implementation": "sdpa",
}


def make(**options: Any) -> PreTrainedModel:
    return FalconModel(FalconConfig(**SIZES | options))


CASES = {
    "padded": Case(make, compared=seeing, accelerated=2),
    "whole": Case(make, whole_texts),
    "eager": Case(lambda: make(attn_implementation="eager"), compared=seeing),
    "long": Case(lambda: make(num_hidden_layers=1), lambda: texts(600), seeing),
    "one_key_head": Case(lambda: make(multi_query=True), compared=seeing),
    "grouped": Case(
        lambda: make(num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True),
        compared=seeing,
    ),
    "lm": Case(lambda: FalconForCausalLM(FalconConfig(**SIZES)), compared=seeing),
}
