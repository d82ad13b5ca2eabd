"""DeBERTa-v2 and v3: relative positions in buckets."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from posenc.encoding.prepared import reused
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.runtime import has_values
from posenc.transformers.acceleration.families.common.disentangled import (
    DisentangledAttention,
    DisentangledEncoder,
)
from posenc.transformers.acceleration.family import AcceleratedFamily


class DebertaV2Attention(DisentangledAttention, DisentangledSelfAttention):
    """Self-attention."""

    def split(self, hidden_states: Float[Tensor, "B L C"]) -> tuple[Tensor, Tensor, Tensor]:
        layers = self.query_proj, self.key_proj, self.value_proj
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        return q, k, v

    def summands(self) -> int:
        return len({"c2p", "p2c"} & set(self.pos_att_type))

    def rows(self, tokens: Float[Tensor, "B H L D"]) -> tuple[int, int]:
        if not has_values(tokens):  # one graph serves all lengths
            return 0, 2 * self.pos_ebd_size - 1
        return _reached(tokens.shape[2], *self._buckets())

    def bucket(self, offset: Offsets) -> BucketIndex:
        return _bucket(offset, *self._buckets())

    def _buckets(self) -> tuple[int, int, int]:
        return self.pos_ebd_size, self.position_buckets, self.max_relative_positions

    def projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        key, query = self.key_proj, self.query_proj
        separate = not self.share_att_key
        return (
            (self.pos_key_proj if separate else key) if "c2p" in self.pos_att_type else None,
            (self.pos_query_proj if separate else query) if "p2c" in self.pos_att_type else None,
        )


def _bucket(offset: Offsets, span: int, buckets: int, furthest: int) -> BucketIndex:
    """The row of each offset among ``2 * span``."""
    back = -offset[..., 0].long()
    if buckets > 0 and furthest > 0:
        back = make_log_bucket_position(back, buckets, furthest).long()
    return (back + span).clamp(0, 2 * span - 1)


@lru_cache(256)
def _reached(length: int, *buckets: int) -> tuple[int, int]:
    """The first and the last row that a sequence reads."""
    ends = torch.tensor([[length - 1.0], [1.0 - length]], device="cpu")
    first, last = _bucket(ends, *buckets).tolist()
    return first, last


class DebertaV2Encoding(DisentangledEncoder, DebertaV2Encoder):
    """The encoder."""

    def get_rel_embedding(self) -> Tensor | None:
        if not self.relative_attention or "layer_norm" not in self.norm_rel_ebd:
            return super().get_rel_embedding()
        compute = super().get_rel_embedding
        layers = (self.rel_embeddings, self.LayerNorm)
        embedding: Tensor | None = reused(compute, "relative embedding", layers=layers)
        return embedding


ENTRY = AcceleratedFamily(
    title="DeBERTa-v2 and v3",
    classes={DisentangledSelfAttention: DebertaV2Attention, DebertaV2Encoder: DebertaV2Encoding},
    shortest=1,
)
