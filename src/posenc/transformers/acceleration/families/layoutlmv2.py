"""LayoutLMv2 and LayoutXLM: T5's buckets by order, and by the corners of boxes along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.layoutlmv2.modeling_layoutlmv2 import (
    LayoutLMv2Encoder,
    LayoutLMv2SelfAttention,
    relative_position_bucket,
)

from posenc.transformers.acceleration.families.common.page import PageAttention, PageEncoder, page
from posenc.transformers.acceleration.family import AcceleratedFamily


class AcceleratedLayoutLMv2Attention(PageAttention, LayoutLMv2SelfAttention):
    """Self-attention, whose masks are not 0 where a key is hidden."""

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.compute_qkv(hidden_states)

    def summed(self, biases: Sequence[Tensor], mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return sum(biases[1:], biases[0]) if biases else None
        bias = sum(biases, torch.zeros_like(mask))
        return bias.masked_fill(mask.bool(), torch.finfo(bias.dtype).min)


class AcceleratedLayoutLMv2Encoder(PageEncoder, LayoutLMv2Encoder):
    """The encoder."""

    relative_position_bucket = staticmethod(relative_position_bucket)
    _calculate_1d_position_embeddings = PageEncoder.bias_by_order
    _calculate_2d_position_embeddings = PageEncoder.bias_by_boxes

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        mask = self.masked(attention_mask, hidden_states)
        return self.original_forward(hidden_states=hidden_states, attention_mask=mask, **options)


def _inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    image = torch.randn(rows, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return page(model, rows, length) | {"image": image}


ENTRY = AcceleratedFamily(
    title="LayoutLMv2",
    classes={
        LayoutLMv2SelfAttention: AcceleratedLayoutLMv2Attention,
        LayoutLMv2Encoder: AcceleratedLayoutLMv2Encoder,
    },
    shortest=128,
    inputs=_inputs,
    limits="with the bias written once for all layers",
)
