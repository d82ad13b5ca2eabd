"""SAM."""

from __future__ import annotations

from typing import Any

from transformers import (
    PreTrainedModel,
    SamConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamPromptEncoderConfig,
    SamVisionConfig,
    SamVisionModel,
)

from tests.transformers.acceleration.case import Case, images

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "mlp_dim": 32,
    "output_channels": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 20,
    "patch_size": 4,
    "window_size": 3,
    "global_attn_indexes": [1],
    "num_pos_feats": 4,
}
PROMPTS = {"hidden_size": 8, "image_size": 20, "patch_size": 4, "mask_input_channels": 4}
MASKS = {
    "hidden_size": 8,
    "mlp_dim": 8,
    "num_attention_heads": 2,
    "attention_downsample_rate": 1,
    "iou_head_hidden_dim": 8,
}


def make(**options: Any) -> PreTrainedModel:
    return SamVisionModel(SamVisionConfig(**SIZES | options))


def with_masks() -> PreTrainedModel:
    """A model with the decoder of masks."""
    prompts, masks = SamPromptEncoderConfig(**PROMPTS), SamMaskDecoderConfig(**MASKS)
    vision = SamVisionConfig(**SIZES)
    return SamModel(
        SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    )


CASES = {
    "sdpa": Case(lambda: make(attn_implementation="sdpa"), images, accelerated=2),
    "eager": Case(lambda: make(attn_implementation="eager"), images),
    "without_relative_positions": Case(lambda: make(use_rel_pos=False), images),
    "without_absolute_positions": Case(lambda: make(use_abs_pos=False), images),
    "masks": Case(with_masks, images, accelerated=2),
}
