"""BEiT."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import BeitConfig, BeitForImageClassification, BeitModel, PreTrainedModel

from tests.transformers.acceleration.case import Case, images

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 20,
    "patch_size": 4,
    "use_relative_position_bias": True,
    "drop_path_rate": 0.0,
}


def make(**options: Any) -> PreTrainedModel:
    return BeitModel(BeitConfig(**SIZES | options))


def resized() -> dict[str, Any]:
    return images(24, 12) | {"interpolate_pos_encoding": True}


CASES = {
    "model": Case(make, images, accelerated=4),
    "eager": Case(lambda: make(attn_implementation="eager"), images),
    "shared": Case(
        lambda: make(use_relative_position_bias=False, use_shared_relative_position_bias=True),
        images,
        accelerated=3,
    ),
    "both": Case(lambda: make(use_shared_relative_position_bias=True), images),
    "resized": Case(make, resized),
    "other_size": Case(make, partial(images, 24, 12)),
    "classes": Case(lambda: BeitForImageClassification(BeitConfig(**SIZES)), images),
}
