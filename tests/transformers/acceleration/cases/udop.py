"""UDOP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, UdopConfig, UdopEncoderModel, UdopModel

from tests.transformers.acceleration.case import Case, images
from tests.transformers.acceleration.cases import t5
from tests.transformers.acceleration.cases.t5 import pairs

SIZES: dict[str, Any] = t5.SIZES | {
    "max_2d_position_embeddings": 64,
    "image_size": 20,
    "patch_size": 4,
    "relative_bias_args": [
        {"type": "1d", "relative_attention_num_buckets": 8, "max_distance": 16},
        {"type": "horizontal", "relative_attention_num_buckets": 16, "max_distance": 40},
        {"type": "vertical", "scaling_factor": 30},
    ],
}


def make(**options: Any) -> PreTrainedModel:
    return UdopModel(UdopConfig(**SIZES | options))


def pages() -> dict[str, Tensor]:
    """Texts with boxes, and the texts to be generated."""
    inputs = pairs()
    generator = torch.Generator().manual_seed(2)
    corners = 0.5 * torch.rand(*inputs["input_ids"].shape, 2, generator=generator)
    return inputs | {"bbox": torch.cat([corners, 2 * corners], dim=-1)}


def encoded() -> dict[str, Tensor]:
    return {name: x for name, x in pages().items() if not name.startswith("decoder")}


def prefixed() -> PreTrainedModel:
    """A model with buckets of their own for what comes before the page."""
    return make(relative_bias_args=[{"type": "1d"}, {"type": "vertical", "prefix_bucket": True}])


CASES = {
    "eager": Case(lambda: make(attn_implementation="eager"), pages, accelerated=12),
    "sdpa": Case(lambda: make(attn_implementation="sdpa"), pages),
    "encoder": Case(lambda: UdopEncoderModel(UdopConfig(**SIZES)), encoded, accelerated=5),
    "images": Case(make, lambda: pages() | images()),
    "prefixed": Case(prefixed, pages),
}
