"""MPNet."""

from __future__ import annotations

from typing import Any

from transformers import MPNetConfig, MPNetForMaskedLM, MPNetModel

from tests.transformers.acceleration.case import VOCABULARY, Case, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
}

CASES = {
    "model": Case(lambda: MPNetModel(MPNetConfig(**SIZES)), accelerated=3),
    "whole": Case(lambda: MPNetModel(MPNetConfig(**SIZES)), whole_texts),
    "masked_lm": Case(lambda: MPNetForMaskedLM(MPNetConfig(**SIZES))),
}
