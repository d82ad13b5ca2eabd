"""Funnel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import FunnelBaseModel, FunnelConfig, FunnelForMaskedLM, FunnelModel

from tests.transformers.acceleration.case import VOCABULARY, Case, texts, whole_texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "block_sizes": [1, 2],
    "num_decoder_layers": 1,
    "d_model": 24,
    "n_head": 3,
    "d_head": 8,
    "d_inner": 32,
}


def make(**options: Any) -> FunnelModel:
    return FunnelModel(FunnelConfig(**SIZES | options))


def segments() -> dict[str, Tensor]:
    """Padded texts of two segments after a class token, as the tokenizer numbers them."""
    inputs = texts(24)
    kinds = torch.zeros_like(inputs["input_ids"])
    kinds[:, 9:] = 1
    kinds[1, 16] = kinds[:, 0] = 2
    return inputs | {"token_type_ids": kinds}


def three_types() -> dict[str, Tensor]:
    inputs = segments()
    inputs["token_type_ids"][:, 13:] = 5
    return inputs


def one_type() -> dict[str, Tensor]:
    """A class token and one segment."""
    kinds = torch.zeros(2, 23, dtype=torch.long)
    kinds[:, 0] = 2
    return whole_texts() | {"token_type_ids": kinds}


def base() -> FunnelBaseModel:
    """Three blocks, the second of which runs twice, without a decoder."""
    return FunnelBaseModel(
        FunnelConfig(**SIZES | {"block_sizes": [1, 1, 2], "block_repeats": [1, 2, 1]})
    )


CASES = {
    "padded": Case(make, accelerated=6),
    "whole": Case(make, whole_texts),
    "segments": Case(make, segments),
    "three_types": Case(make, three_types),
    "one_type": Case(make, one_type),
    "long": Case(lambda: make(block_sizes=[1, 1]), lambda: texts(600)),
    "no_class_token": Case(lambda: make(separate_cls=False), segments),
    "not_truncated": Case(lambda: make(truncate_seq=False), segments),
    "keys_pooled": Case(lambda: make(pool_q_only=False), segments),
    "largest_of_two": Case(lambda: make(pooling_type="max"), segments),
    "blocks": Case(base, segments),
    "masked_lm": Case(lambda: FunnelForMaskedLM(FunnelConfig(**SIZES)), segments),
}
