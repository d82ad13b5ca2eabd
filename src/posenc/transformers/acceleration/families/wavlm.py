"""WavLM: T5's buckets, one table for all layers, times a gate for each query and head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.wavlm.modeling_wavlm import WavLMAttention

from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.transformers.acceleration.accelerated import Accelerated, wants_weights
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.interface import PositionBias, attention
from posenc.transformers.acceleration.masks import MasksRead


@dataclass(eq=False)
class SharedBias(PositionBias):
    """The bias of all layers before their gates, and what their mask says of keys."""

    masks: MasksRead = field(default_factory=MasksRead)


class AcceleratedWavLMAttention(Accelerated, WavLMAttention):
    """Self-attention that hands its position bias on as a table."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        position_bias: Tensor | SharedBias | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | SharedBias | None]:
        length = hidden_states.shape[1]
        if position_bias is None and length >= self.shortest:
            position_bias = self._bias(hidden_states)
        if not isinstance(position_bias, SharedBias) or wants_weights(self, options):
            dense_bias = position_bias
            if isinstance(position_bias, SharedBias):
                dense_bias = position_bias.dense
            inputs = {"attention_mask": attention_mask, "position_bias": dense_bias}
            output, weights, dense_bias = self.original_forward(
                hidden_states=hidden_states, **inputs, **options
            )
            return output, weights, dense_bias if position_bias is None else position_bias
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = self.in_heads(hidden_states, self.num_heads, *layers)
        attended = None
        if attention_mask is not None:
            attended, _ = position_bias.masks.keys(attention_mask, lambda mask: mask.eq(1))
        (shared,) = position_bias.terms
        bias = PositionBias((self._gated(shared, hidden_states),))
        dropout = self.dropout if self.training else 0.0
        output, weights = attention(
            self, q, k, v, attended, dropout, self.scaling, position_bias=bias
        )
        return self.out_proj(output.flatten(2)), weights, position_bias

    def _bias(self, hidden_states: Float[Tensor, "B L C"]) -> SharedBias:
        """The bias of all layers, before any gate."""
        batch, length, _ = hidden_states.shape

        def bucket(offset: Offsets) -> BucketIndex:
            return self._relative_positions_bucket(offset[..., 0].long())

        def dense() -> Tensor:
            bias: Tensor = self.compute_bias(length, length)  # [H, L, L]
            return bias.repeat(batch, 1, 1)

        rows = torch.arange(self.num_buckets, device=hidden_states.device)
        table = self.rel_attn_embed(rows).T  # [H, N]
        terms = BucketedTerms(bucket, table=table, max_distance=self.max_distance)
        return SharedBias((terms,), dense)

    def _gated(self, bias: BucketedTerms, hidden_states: Tensor) -> BucketedTerms:
        """The bias times this layer's gates."""
        heads = hidden_states.view(*hidden_states.shape[:2], self.num_heads, -1).transpose(1, 2)
        sums = self.gru_rel_pos_linear(heads).unflatten(-1, (2, 4)).sum(-1)
        first, second = sums.sigmoid().chunk(2, dim=-1)
        gate = first * (second * self.gru_rel_pos_const - 1.0) + 2.0  # [B, H, L, 1]
        product = TokenTableProduct(gate, cast(Tensor, bias.table).unsqueeze(-1))
        return BucketedTerms(bias.bucket, left=product, max_distance=bias.max_distance)


ENTRY = AcceleratedFamily(
    title="WavLM", classes={WavLMAttention: AcceleratedWavLMAttention}, shortest=256
)
