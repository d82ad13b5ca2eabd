"""T5's buckets: a table of logits instead of a bias for each pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding.tensors import BucketIndex
from posenc.transformers.acceleration.accelerated import Accelerated, AcceleratedFamily
from posenc.transformers.acceleration.interface import PositionBias, attention
from posenc.transformers.acceleration.masks import attended_keys
from posenc.transformers.acceleration.terms import bias_by_bucket


class T5Bias(Accelerated):
    """Attention that hands its position bias on as a table, and none where it has none."""

    has_relative_attention_bias = property(lambda module: True)
    """Asks ``compute_bias`` in cross-attention too, where transformers writes zeros out."""

    def buckets(self, relative_position: Tensor) -> BucketIndex:
        """Rows of the table by offset."""
        return self._relative_position_bucket(
            relative_position,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )

    def compute_bias(
        self, *lengths: Any, device: torch.device | None = None, **options: Any
    ) -> PositionBias:
        if "relative_attention_bias" not in self._modules:
            return PositionBias()
        if device is None:
            device = self.relative_attention_bias.weight.device
        term = bias_by_bucket(
            self.buckets,
            self.relative_attention_bias,
            self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
            device=device,
        )
        dense: Callable[..., Tensor] = super().compute_bias  # type: ignore[misc]
        return PositionBias((term,), lambda: dense(*lengths, device=device, **options))


class UMT5Bias(T5Bias):
    """Attention with a bias in every layer."""

    def buckets(self, relative_position: Tensor) -> BucketIndex:
        return self._relative_position_bucket(relative_position)


def t5() -> AcceleratedFamily:
    """T5; its cross-attention has no bias."""
    from transformers.models.t5 import modeling_t5 as modeling

    classes = {modeling.T5Attention: T5Bias}
    return AcceleratedFamily("T5", classes, configured=(modeling.T5Stack,), shortest=256)


def mt5() -> AcceleratedFamily:
    """mT5, as T5."""
    from transformers.models.mt5 import modeling_mt5 as modeling

    classes = {modeling.MT5Attention: T5Bias}
    return AcceleratedFamily("mT5", classes, configured=(modeling.MT5Stack,))


def umt5() -> AcceleratedFamily:
    """UMT5, as T5 with a bias in every layer."""
    from transformers.models.umt5 import modeling_umt5 as modeling

    classes = {modeling.UMT5Attention: UMT5Bias}
    return AcceleratedFamily("UMT5", classes, configured=(modeling.UMT5Stack,))


def switch_transformers() -> AcceleratedFamily:
    """Switch Transformers, as T5."""
    from transformers.models.switch_transformers import modeling_switch_transformers as modeling

    classes, encoder = (
        {modeling.SwitchTransformersAttention: T5Bias},
        modeling.SwitchTransformersStack,
    )
    return AcceleratedFamily("Switch Transformers", classes, configured=(encoder,))


def longt5() -> AcceleratedFamily:
    """LongT5's decoder, as T5; the encoder attends locally already."""
    from transformers.models.longt5 import modeling_longt5 as modeling

    local = "it attends to blocks beside each other, in memory linear in length"
    sparse = "its keys are blocks beside each other and means of blocks"
    return AcceleratedFamily(
        title="LongT5",
        classes={modeling.LongT5Attention: T5Bias},
        configured=(modeling.LongT5Stack,),
        unserved={
            modeling.LongT5LocalAttention: local,
            modeling.LongT5TransientGlobalAttention: sparse,
        },
    )


class MPNetAttention(Accelerated):
    """Self-attention that takes a ``PositionBias``; with any other it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        position_bias: Tensor | PositionBias | None = None,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        inputs: dict[str, Any] = {"position_bias": position_bias}
        inputs["output_attentions"] = output_attentions
        if not isinstance(position_bias, PositionBias):
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=attention_mask, **inputs, **options
            )
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, self.q, self.k, self.v)
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attention(self, q, k, v, attention_mask, dropout, **inputs)
        output = self.o(output.flatten(2))
        return (output, weights) if output_attentions else (output,)


class MPNetEncoding(Accelerated):
    """The encoder, whose position bias is a table instead of a number for each pair."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if hidden_states.shape[1] >= self.shortest:
            attention_mask = attended_keys(attention_mask)
        inputs = {"hidden_states": hidden_states, "attention_mask": attention_mask}
        return self.original_forward(**inputs, **options)

    def compute_position_bias(
        self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> Tensor | PositionBias:
        dense: Callable[..., Tensor] = super().compute_position_bias  # type: ignore[misc]
        if position_ids is not None or x.shape[1] < self.shortest:
            return dense(x, position_ids, num_buckets)

        def bucket(relative_position: Tensor) -> BucketIndex:
            return self.relative_position_bucket(relative_position, num_buckets=num_buckets)

        table = self.relative_attention_bias
        term = bias_by_bucket(
            bucket, table, table.num_embeddings, max_distance=128, device=x.device
        )
        return PositionBias((term,), lambda: dense(x, position_ids, num_buckets))


def mpnet() -> AcceleratedFamily:
    """MPNet (all-mpnet-base-v2): one table for all layers."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

    classes = {MPNetSelfAttention: MPNetAttention, MPNetEncoder: MPNetEncoding}
    return AcceleratedFamily("MPNet", classes, shortest=256)
