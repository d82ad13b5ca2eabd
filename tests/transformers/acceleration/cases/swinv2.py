"""Swin-v2."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel, Swinv2Config, Swinv2ForImageClassification, Swinv2Model

from tests.transformers.acceleration.case import Case, images
from tests.transformers.acceleration.cases.swin import SIZES, small


def make(**options: Any) -> PreTrainedModel:
    return Swinv2Model(Swinv2Config(**SIZES | options))


CASES = {
    "model": Case(make, small, accelerated=3),
    "no_bias": Case(lambda: make(qkv_bias=False), small),
    "padded": Case(make, partial(images, 20, 28)),
    "uneven": Case(lambda: make(window_size=3), small),
    "from_small_windows": Case(lambda: make(pretrained_window_sizes=[2, 2]), small),
    "classes": Case(lambda: Swinv2ForImageClassification(Swinv2Config(**SIZES)), small),
}
