"""MPNet (all-mpnet-base-v2): T5's buckets, one table for all layers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from posenc.encoding import BucketedTerms
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.interface import PositionBias, attention
from posenc.transformers.acceleration.masks import attended_keys


class MPNetAttention(Accelerated, MPNetSelfAttention):
    """Self-attention that takes a ``PositionBias``; with any other it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        position_bias: Tensor | PositionBias | None = None,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        if not isinstance(position_bias, PositionBias):
            return self.original_forward(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                position_bias=position_bias,
                output_attentions=output_attentions,
                **options,
            )
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, self.q, self.k, self.v)
        dropout = self.dropout.p if self.training else 0.0
        inputs: dict[str, Any] = {"position_bias": position_bias}
        inputs["output_attentions"] = output_attentions
        output, weights = attention(self, q, k, v, attention_mask, dropout, **inputs)
        output = self.o(output.flatten(2))
        return (output, weights) if output_attentions else (output,)


class MPNetEncoding(Accelerated, MPNetEncoder):
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
        dense = super().compute_position_bias
        if position_ids is not None or x.shape[1] < self.shortest:
            return dense(x, position_ids, num_buckets)

        def bucket(offset: Offsets) -> BucketIndex:
            return self.relative_position_bucket(offset[..., 0].long(), num_buckets=num_buckets)

        rows = torch.arange(self.relative_attention_bias.num_embeddings, device=x.device)
        table = self.relative_attention_bias(rows).T  # [H, N]
        terms = BucketedTerms(bucket, table=table, max_distance=128)
        return PositionBias((terms,), lambda: dense(x, position_ids, num_buckets))


ENTRY = AcceleratedFamily(
    title="MPNet",
    classes={MPNetSelfAttention: MPNetAttention, MPNetEncoder: MPNetEncoding},
    shortest=256,
)
