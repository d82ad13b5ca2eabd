"""LayoutLMv3: T5's buckets by order, and by the corners of boxes along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.layoutlmv3.modeling_layoutlmv3 import (
    LayoutLMv3Encoder,
    LayoutLMv3SelfAttention,
)

from posenc.transformers.acceleration.families.common.page import PageAttention, PageEncoder, page
from posenc.transformers.acceleration.family import AcceleratedFamily


class AcceleratedLayoutLMv3Attention(PageAttention, LayoutLMv3SelfAttention):
    """Self-attention. The factor of its "CogView" softmax cancels out."""

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)

    def summed(self, biases: Sequence[Tensor], mask: Tensor | None) -> Tensor | None:
        if not biases:
            return mask
        bias: Tensor = sum(biases[1:], biases[0])
        if "position_bias" not in self.parameters_of_forward:  # which is scaled already
            bias = bias * self.attention_head_size**-0.5
        return bias if mask is None else bias + mask


class AcceleratedLayoutLMv3Encoder(PageEncoder, LayoutLMv3Encoder):
    """The encoder."""

    if not hasattr(LayoutLMv3Encoder, "_relative_position_lookup"):  # which reads by distance too
        _cal_1d_pos_emb = PageEncoder.bias_by_order
        _cal_2d_pos_emb = PageEncoder.bias_by_boxes

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        mask = self.masked(attention_mask, hidden_states)
        return self.original_forward(hidden_states=hidden_states, attention_mask=mask, **options)


def _inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    config, made = model.config, page(model, rows, length)
    if config.visual_embed:
        size = (rows, config.num_channels, config.input_size, config.input_size)
        made["pixel_values"] = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return made


ENTRY = AcceleratedFamily(
    title="LayoutLMv3",
    classes={
        LayoutLMv3SelfAttention: AcceleratedLayoutLMv3Attention,
        LayoutLMv3Encoder: AcceleratedLayoutLMv3Encoder,
    },
    shortest=128,
    inputs=_inputs,
    limits="with the bias written once for all layers",
)
