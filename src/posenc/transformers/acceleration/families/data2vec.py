"""Data2Vec's model of images: as BEiT."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.models.data2vec.modeling_data2vec_vision import (
    Data2VecVisionRelativePositionBias,
    Data2VecVisionSdpaSelfAttention,
    Data2VecVisionSelfAttention,
)

from posenc.transformers.acceleration.accelerated import Accelerated, wants_weights
from posenc.transformers.acceleration.families.common.images import (
    ImageBias,
    ImageBiasTable,
    attend_images,
)
from posenc.transformers.acceleration.family import AcceleratedFamily


class PatchAttention(Accelerated):
    """Attention among patches; with dropout, and for weights, it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        output_attentions: bool = False,
        relative_position_bias: Tensor | ImageBias | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        length = hidden_states.shape[1]
        weights = wants_weights(self, {"output_attentions": output_attentions})
        dropped = self.training and self.dropout.p > 0
        bias = None
        if not (weights or dropped or length <= self.shortest):
            bias = relative_position_bias
            if self.has_relative_position_bias:
                size = tuple(side // self.config.patch_size for side in resolution or ())
                layer_bias = self.relative_position_bias(
                    size, interpolate_pos_encoding, dim_size=length
                )
                bias = layer_bias if bias is None else layer_bias + bias
        if not isinstance(bias, ImageBias):
            return self.original_forward(
                hidden_states=hidden_states,
                output_attentions=output_attentions,
                relative_position_bias=relative_position_bias,
                interpolate_pos_encoding=interpolate_pos_encoding,
                resolution=resolution,
                **options,
            )
        layers = self.query, self.key, self.value
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        return (attend_images(self, q, k, v, bias, self.attention_head_size**-0.5),)


ENTRY = AcceleratedFamily(
    title="Data2Vec's model of images",
    classes={
        Data2VecVisionRelativePositionBias: ImageBiasTable,
        Data2VecVisionSelfAttention: PatchAttention,
        Data2VecVisionSdpaSelfAttention: PatchAttention,
    },
    limits="without dropout of weights",
)
