"""Bloom."""

from __future__ import annotations

from typing import Any

from transformers import BloomConfig, BloomForCausalLM, BloomModel, PreTrainedModel

from tests.transformers.acceleration.case import VOCABULARY, Case, seeing, texts, whole_texts

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 3}


def make(**options: Any) -> PreTrainedModel:
    return BloomModel(BloomConfig(**SIZES | options))


CASES = {
    "padded": Case(make, compared=seeing, accelerated=2),
    "whole": Case(make, whole_texts),
    "long": Case(lambda: make(n_layer=1), lambda: texts(600), seeing),
    "power_of_two": Case(lambda: make(n_head=4), compared=seeing),
    "lm": Case(lambda: BloomForCausalLM(BloomConfig(**SIZES)), compared=seeing),
}
