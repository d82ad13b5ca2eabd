"""Data2Vec's model of images."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    Data2VecVisionConfig,
    Data2VecVisionForImageClassification,
    Data2VecVisionModel,
    PreTrainedModel,
)

from tests.transformers.acceleration.case import Case, images
from tests.transformers.acceleration.cases.beit import SIZES, resized


def make(**options: Any) -> PreTrainedModel:
    return Data2VecVisionModel(Data2VecVisionConfig(**SIZES | options))


CASES = {
    "sdpa": Case(make, images, accelerated=4),
    "eager": Case(lambda: make(attn_implementation="eager"), images),
    "shared": Case(
        lambda: make(use_relative_position_bias=False, use_shared_relative_position_bias=True),
        images,
        accelerated=3,
    ),
    "both": Case(lambda: make(use_shared_relative_position_bias=True), images),
    "resized": Case(make, resized),
    "other_size": Case(make, partial(images, 24, 12)),
    "classes": Case(
        lambda: Data2VecVisionForImageClassification(Data2VecVisionConfig(**SIZES)), images
    ),
}
