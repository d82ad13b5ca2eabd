"""SAM-HQ."""

from __future__ import annotations

from typing import Any

from transformers import (
    PreTrainedModel,
    SamHQConfig,
    SamHQMaskDecoderConfig,
    SamHQModel,
    SamHQPromptEncoderConfig,
    SamHQVisionConfig,
    SamHQVisionModel,
)

from tests.transformers.acceleration.case import Case, images
from tests.transformers.acceleration.cases.sam import MASKS, PROMPTS, SIZES


def make(**options: Any) -> PreTrainedModel:
    return SamHQVisionModel(SamHQVisionConfig(**SIZES | options))


def with_masks() -> PreTrainedModel:
    """A model with the decoder of masks."""
    prompts = SamHQPromptEncoderConfig(**PROMPTS)
    masks = SamHQMaskDecoderConfig(**MASKS, vit_dim=24)
    vision = SamHQVisionConfig(**SIZES)
    return SamHQModel(
        SamHQConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    )


CASES = {
    "sdpa": Case(lambda: make(attn_implementation="sdpa"), images, accelerated=2),
    "eager": Case(lambda: make(attn_implementation="eager"), images),
    "without_relative_positions": Case(lambda: make(use_rel_pos=False), images),
    "without_absolute_positions": Case(lambda: make(use_abs_pos=False), images),
    "masks": Case(with_masks, images, relative=1e-4),
}
