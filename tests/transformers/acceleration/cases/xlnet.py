"""XLNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, XLNetConfig, XLNetLMHeadModel, XLNetModel

from tests.transformers.acceleration.case import VOCABULARY, Case, texts, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "n_layer": 2,
    "n_head": 3,
    "d_inner": 32,
    "dropout": 0.1,
}


def make(**options: Any) -> PreTrainedModel:
    return XLNetModel(XLNetConfig(**SIZES | options))


def segments() -> dict[str, Tensor]:
    """Texts of two segments, a class token and padding, as the tokenizer numbers them."""
    inputs = texts()
    kinds = torch.zeros_like(inputs["input_ids"])
    kinds[:, 9:] = 1
    kinds[1, 16] = kinds[0, -1] = 2
    return inputs | {"token_type_ids": kinds.where(inputs["attention_mask"].bool(), 3)}


def memories() -> dict[str, Any]:
    """Texts of two segments after 5 earlier tokens."""
    generator = torch.Generator().manual_seed(2)
    return segments() | {"mems": list(torch.randn(2, 5, 2, 24, generator=generator))}


def queried() -> dict[str, Any]:
    """Texts of which 3 tokens are to be predicted from all others."""
    inputs = texts()
    mapping = torch.zeros(2, 3, inputs["input_ids"].shape[1])
    mapping[:, 0, 7] = mapping[:, 1, 10] = mapping[:, 2, 11] = 1.0
    return inputs | {"target_mapping": mapping}


def permuted() -> dict[str, Any]:
    """The same, where the tokens are hidden from each other."""
    inputs = queried()
    hidden = inputs["target_mapping"].sum(1)  # [B, L]
    return inputs | {"perm_mask": hidden.unsqueeze(1).expand(-1, hidden.shape[1], -1)}


CASES = {
    "padded": Case(make, accelerated=3),
    "whole": Case(make, whole_texts),
    "long": Case(lambda: make(n_layer=1), lambda: texts(600)),
    "segments": Case(make, segments),
    "one_segment": Case(
        make, lambda: whole_texts() | {"token_type_ids": torch.zeros(2, 23, dtype=torch.long)}
    ),
    "memories": Case(make, memories),
    "whole_memories": Case(make, lambda: whole_texts() | {"mems": memories()["mems"]}),
    "kept": Case(lambda: make(mem_len=9), memories),
    "queried": Case(make, queried),
    "permuted": Case(make, permuted),
    "clamped": Case(lambda: make(clamp_len=6)),
    "both_directions": Case(lambda: make(bi_data=True), segments),
    "lm": Case(lambda: XLNetLMHeadModel(XLNetConfig(**SIZES)), segments),
}
