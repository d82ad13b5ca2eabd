"""Swin."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel, SwinConfig, SwinForImageClassification, SwinModel

from tests.transformers.acceleration.case import Case, images

SIZES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 1],
    "num_heads": [3, 6],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
"""Windows of 4 × 4, of 8 × 8 cells and then of 4 × 4; the second layer's are shifted."""


def make(**options: Any) -> PreTrainedModel:
    return SwinModel(SwinConfig(**SIZES | options))


small = partial(images, 16, 16)

CASES = {
    "model": Case(make, small, accelerated=3),
    "eager": Case(lambda: make(attn_implementation="eager"), small),
    "no_bias": Case(lambda: make(qkv_bias=False), small),
    "padded": Case(make, partial(images, 20, 28)),
    "uneven": Case(lambda: make(window_size=3), small),
    "classes": Case(lambda: SwinForImageClassification(SwinConfig(**SIZES)), small),
}
