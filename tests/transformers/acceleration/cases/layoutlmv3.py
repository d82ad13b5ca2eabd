"""LayoutLMv3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LayoutLMv3Config,
    LayoutLMv3ForTokenClassification,
    LayoutLMv3Model,
    PreTrainedModel,
)

from tests.transformers.acceleration.case import VOCABULARY, Case, images, texts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
    "max_2d_position_embeddings": 101,
    "coordinate_size": 4,
    "shape_size": 4,
    "rel_pos_bins": 8,
    "max_rel_pos": 16,
    "rel_2d_pos_bins": 16,
    "max_rel_2d_pos": 40,
    "input_size": 20,
    "patch_size": 4,
}


def make(**options: Any) -> PreTrainedModel:
    return LayoutLMv3Model(LayoutLMv3Config(**SIZES | options))


def boxed_texts() -> dict[str, Tensor]:
    """Texts with boxes."""
    inputs = texts()
    generator = torch.Generator().manual_seed(2)
    corners = torch.randint(50, (*inputs["input_ids"].shape, 2), generator=generator)
    return inputs | {"bbox": torch.cat([corners, 2 * corners], dim=-1)}


def pages() -> dict[str, Tensor]:
    """Texts with boxes, and images."""
    return boxed_texts() | images()


def one_row() -> dict[str, Tensor]:
    return {name: x[:1] for name, x in pages().items()}


CASES = {
    "eager": Case(lambda: make(attn_implementation="eager"), pages, accelerated=3, written=True),
    "texts": Case(make, boxed_texts),
    "images": Case(make, images),
    "one_row": Case(make, one_row),
    "order_alone": Case(lambda: make(has_spatial_attention_bias=False), pages),
    "without_biases": Case(
        lambda: make(has_relative_attention_bias=False, has_spatial_attention_bias=False), pages
    ),
    "classes": Case(lambda: LayoutLMv3ForTokenClassification(LayoutLMv3Config(**SIZES)), pages),
}
