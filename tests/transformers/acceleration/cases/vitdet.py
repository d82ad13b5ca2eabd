"""ViTDet."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel, VitDetBackbone, VitDetConfig, VitDetModel

from tests.transformers.acceleration.case import Case, images

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 20,
    "pretrain_image_size": 20,
    "patch_size": 4,
    "window_size": 3,
    "window_block_indices": [0],
    "residual_block_indices": [1],
    "use_relative_position_embeddings": True,
}


def make(**options: Any) -> PreTrainedModel:
    return VitDetModel(VitDetConfig(**SIZES | options))


CASES = {
    "model": Case(make, images, accelerated=2),
    "other_size": Case(make, partial(images, 24, 12)),
    "backbone": Case(lambda: VitDetBackbone(VitDetConfig(**SIZES)), images),
    "without_relative_positions": Case(
        lambda: make(use_relative_position_embeddings=False), images
    ),
}
