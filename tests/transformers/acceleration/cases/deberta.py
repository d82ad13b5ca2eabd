"""DeBERTa (v1)."""

from __future__ import annotations

from typing import Any

from transformers import DebertaConfig, DebertaForMaskedLM, DebertaModel, PreTrainedModel

from tests.transformers.acceleration.case import VOCABULARY, Case, texts, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
}


def make(**options: Any) -> PreTrainedModel:
    return DebertaModel(DebertaConfig(**SIZES | options))


CASES = {
    "padded": Case(make, accelerated=3),
    "whole": Case(make, whole_texts),
    "masked_lm": Case(lambda: DebertaForMaskedLM(DebertaConfig(**SIZES))),
    "beyond_the_span": Case(lambda: make(max_relative_positions=7)),
    "long": Case(lambda: make(num_hidden_layers=1), lambda: texts(600)),
    "c2p": Case(lambda: make(pos_att_type=["c2p"])),
    "p2c": Case(lambda: make(pos_att_type=["p2c"])),
    "without_terms": Case(lambda: make(pos_att_type=[])),
    "without_relative_attention": Case(
        lambda: make(relative_attention=False, position_biased_input=True)
    ),
}
