"""DeBERTa-v2 and v3: content attends to relative positions, and relative positions to content."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from posenc.attention import attend
from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.integrations.transformers.accelerate.accelerated import Accelerated, settings_of
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily
from posenc.integrations.transformers.accelerate.masks import all_attended, grid_of
from posenc.integrations.transformers.accelerate.terms import encoding_of


class DebertaV2Attention(Accelerated, DisentangledSelfAttention):
    """Disentangled attention whose masks are ``[B, K]`` or None; any other runs as it did."""

    original = DisentangledSelfAttention

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        own = output_attentions or query_states is not None or relative_pos is not None
        if own or (attention_mask is not None and attention_mask.dim() > 2):
            mask = _pairs(attention_mask, hidden_states)
            result: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
            return result
        heads, length = self.num_attention_heads, hidden_states.shape[1]
        q, k, v = (
            projection(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection in (self.query_proj, self.key_proj, self.value_proj)
        )
        relative = {"c2p", "p2c"} & set(self.pos_att_type)
        scale = (q.shape[-1] * (1 + len(relative))) ** -0.5
        terms = []
        if self.relative_attention and relative:
            terms.append(self._terms(q * scale, k * scale, self.pos_dropout(rel_embeddings)))
        grid = grid_of(length, length, attention_mask, device=q.device)
        output = attend(
            q,
            k,
            v,
            grid,
            encoding_of(*terms),
            backend=settings_of(self).backend,
            dropout=self.dropout.p if self.training else 0.0,
            scale=scale,
        )
        if attention_mask is not None:  # the weights of a padded query are all the same
            mean = v.mean(dim=2, keepdim=True)
            output = torch.where(attention_mask[:, None, :, None], output, mean)
        return output.transpose(1, 2).flatten(2), None

    def _terms(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B H L D"], embeddings: Tensor
    ) -> BucketedTerms:
        """The relative terms, of scaled queries and keys."""
        length, span = q.shape[2], self.pos_ebd_size
        bucket = partial(
            _bucket, span=span, buckets=self.position_buckets, reach=self.max_relative_positions
        )
        first, last = 0, 2 * span - 1
        if not torch.compiler.is_compiling():  # one graph serves all lengths
            ends = torch.tensor([[length - 1.0], [1.0 - length]], device=q.device)
            first, last = bucket(ends).tolist()
        rows = embeddings[first : last + 1]
        own = not self.share_att_key
        left = right = None
        if "c2p" in self.pos_att_type:
            left = self._product(q, self.pos_key_proj if own else self.key_proj, rows)
        if "p2c" in self.pos_att_type:
            right = self._product(k, self.pos_query_proj if own else self.query_proj, rows)
        return BucketedTerms(
            lambda offset: bucket(offset).clamp(first, last) - first,
            left=left,
            right=right,
            max_distance=self.max_relative_positions,
        )

    def _product(self, tokens: Tensor, projection: nn.Module, rows: Tensor) -> TokenTableProduct:
        projected = projection(rows).unflatten(-1, (self.num_attention_heads, -1))
        return TokenTableProduct(tokens, projected.transpose(0, 1))


class DebertaV2Encoding(Accelerated, DebertaV2Encoder):
    """The encoder, without masks and relative positions of all pairs for long inputs."""

    original = DebertaV2Encoder

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor | None:
        if attention_mask.dim() > 2 or attention_mask.shape[-1] < settings_of(self).shortest:
            mask: Tensor = super().get_attention_mask(attention_mask)
            return mask
        attended = attention_mask.bool()
        return None if all_attended(attended) else attended

    def get_rel_pos(
        self,
        hidden_states: Tensor,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
    ) -> Tensor | None:
        short = hidden_states.shape[1] < settings_of(self).shortest
        if short or query_states is not None or relative_pos is not None:
            pairs: Tensor | None = super().get_rel_pos(hidden_states, query_states, relative_pos)
            return pairs
        return None


def _bucket(offset: Offsets, *, span: int, buckets: int, reach: int) -> BucketIndex:
    """The row of each offset, as transformers computes it."""
    back = -offset[..., 0].long()
    if buckets > 0 and reach > 0:
        back = make_log_bucket_position(back, buckets, reach).long()
    return (back + span).clamp(0, 2 * span - 1)


def _pairs(mask: Tensor | None, hidden_states: Tensor) -> Tensor:
    """The mask of all pairs that the module's own attention takes."""
    if mask is None:
        mask = hidden_states.new_ones(1, hidden_states.shape[1], dtype=torch.bool)
    if mask.dim() > 2:
        return mask
    return (mask.unsqueeze(1) & mask.unsqueeze(2)).unsqueeze(1)


ENTRY = AcceleratedFamily(
    title="DeBERTa-v2 and v3",
    classes={DisentangledSelfAttention: DebertaV2Attention, DebertaV2Encoder: DebertaV2Encoding},
    shortest=1,
)
