"""LayoutLMv2, without its network for images, which is another library's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LayoutLMv2Config, LayoutLMv2PreTrainedModel, PreTrainedModel
from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import layoutlmv3
from tests.transformers.acceleration.cases.layoutlmv3 import boxed_texts

OF_VERSION_3 = ("input_size", "patch_size")
SIZES: dict[str, Any] = {
    name: size for name, size in layoutlmv3.SIZES.items() if name not in OF_VERSION_3
}


class TextModel(LayoutLMv2PreTrainedModel):
    """The encoder over ids."""

    def __init__(self, config: LayoutLMv2Config) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = LayoutLMv2Encoder(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keeps the modules' own: the original's asks for the other library."""

    def forward(
        self, input_ids: Tensor, bbox: Tensor, attention_mask: Tensor, image: Tensor | None = None
    ) -> Any:
        mask = (1.0 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.encoder(self.words(input_ids), mask, bbox=bbox, position_ids=positions)


def make(**options: Any) -> PreTrainedModel:
    return TextModel(LayoutLMv2Config(**SIZES | options))


CASES = {
    "texts": Case(make, boxed_texts, accelerated=3, written=True),
    "slow_qkv": Case(lambda: make(fast_qkv=False), boxed_texts),
    "order_alone": Case(lambda: make(has_spatial_attention_bias=False), boxed_texts),
    "boxes_alone": Case(lambda: make(has_relative_attention_bias=False), boxed_texts),
    "without_biases": Case(
        lambda: make(has_relative_attention_bias=False, has_spatial_attention_bias=False),
        boxed_texts,
    ),
}
