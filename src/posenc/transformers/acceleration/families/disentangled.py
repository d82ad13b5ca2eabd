"""DeBERTa's attention: content attends to relative positions, and they to content."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2

from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.encoding.prepared import reused, reused_later
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import Accelerated, AcceleratedFamily
from posenc.transformers.acceleration.masks import all_attended, grid_of


class DisentangledAttention(Accelerated):
    """Attention whose masks are ``[B, K]`` or None; with any other it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        use_original = output_attentions or query_states is not None or relative_pos is not None
        if use_original or (attention_mask is not None and attention_mask.dim() > 2):
            mask = _pairs(attention_mask, hidden_states)
            if relative_pos is None and query_states is None:
                relative_pos = self.relative_positions(hidden_states)
            return self.original_forward(
                hidden_states=hidden_states,
                attention_mask=mask,
                output_attentions=output_attentions,
                query_states=query_states,
                relative_pos=relative_pos,
                rel_embeddings=rel_embeddings,
            )
        length = hidden_states.shape[1]
        q, k, v = self.split(hidden_states)
        scale = (q.shape[-1] * (1 + self.summands())) ** -0.5
        terms = []
        if self.relative_attention and {"c2p", "p2c"} & set(self.pos_att_type):
            embeddings = self.pos_dropout(rel_embeddings)
            terms.append(self._terms(q * scale, k * scale, embeddings))
        grid = grid_of(length, length, attention_mask, device=q.device)
        output = self.attend(q, k, v, grid, *terms, dropout=self.dropout.p, scale=scale)
        if attention_mask is not None:  # the weights of a padded query are all the same
            mean = v.mean(dim=2, keepdim=True)
            output = torch.where(attention_mask[:, None, :, None], output, mean)
        return output.transpose(1, 2).flatten(2), None

    @abstractmethod
    def split(self, hidden_states: Float[Tensor, "B L C"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``[B, H, L, D]``."""

    @abstractmethod
    def summands(self) -> int:
        """Number of relative terms that the scale counts."""

    @abstractmethod
    def rows(self, tokens: Float[Tensor, "B H L D"]) -> tuple[int, int]:
        """The first and the last row of the embeddings that a sequence of tokens reads."""

    @abstractmethod
    def bucket(self, offset: Offsets) -> BucketIndex:
        """The row of each offset."""

    @abstractmethod
    def projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Projections of the embeddings to keys and to queries."""

    def relative_positions(self, hidden_states: Tensor) -> Tensor | None:
        """Relative positions of all pairs for the original attention; None where it makes them."""
        return None

    def _terms(
        self, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B H L D"], embeddings: Tensor
    ) -> BucketedTerms:
        """The relative terms, of scaled queries and keys."""
        first, last = self.rows(q)
        end, projections = len(embeddings) - 1, self.projections()

        def tables(first: int, last: int) -> list[Tensor | None]:
            rows = embeddings[first : last + 1].flip(0)  # as offsets rise
            return [
                None if layer is None else self._projected(layer, rows) for layer in projections
            ]

        layers = [layer for layer in projections if layer is not None]
        kind = (self.num_attention_heads, *(layer is None for layer in projections))
        projected = reused_later(
            lambda: tables(0, end), "tables", *kind, layers=layers, tensors=(embeddings,)
        )
        if projected is None:
            projected = tables(first, last)
        else:
            projected = [
                None if x is None else x[:, end - last : end - first + 1] for x in projected
            ]
        left, right = (
            None if table is None else TokenTableProduct(tokens, table)
            for tokens, table in zip((q, k), projected, strict=True)
        )
        return BucketedTerms(
            lambda offset: last - self.bucket(offset).clamp(first, last),
            left=left,
            right=right,
            max_distance=self.max_relative_positions,
        )

    def _projected(self, layer: nn.Module, rows: Float[Tensor, "N C"]) -> Float[Tensor, "H N D"]:
        heads: Tensor = layer(rows).unflatten(-1, (self.num_attention_heads, -1)).transpose(0, 1)
        return heads.contiguous()


class DisentangledEncoder(Accelerated):
    """The encoder, without masks and relative positions of all pairs for long inputs."""

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor | None:
        if attention_mask.dim() > 2 or attention_mask.shape[-1] < self.shortest:
            return super().get_attention_mask(attention_mask)  # type: ignore[misc]
        attended: Bool[Tensor, "B K"] = attention_mask.bool()
        return None if all_attended(attended) else attended

    def get_rel_pos(
        self,
        hidden_states: Tensor,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
    ) -> Tensor | None:
        short = hidden_states.shape[1] < self.shortest
        if short or query_states is not None or relative_pos is not None:
            return super().get_rel_pos(  # type: ignore[misc]
                hidden_states, query_states, relative_pos
            )
        return None


def _pairs(mask: Tensor | None, hidden_states: Tensor) -> Tensor:
    """The mask of all pairs that the module's own attention takes."""
    if mask is None:
        mask = hidden_states.new_ones(1, hidden_states.shape[1], dtype=torch.bool)
    if mask.dim() > 2:
        return mask
    return (mask.unsqueeze(1) & mask.unsqueeze(2)).unsqueeze(1)


class DebertaAttention(DisentangledAttention):
    """Attention of DeBERTa (v1): no buckets, and one projection to queries, keys and values."""

    def split(self, hidden_states: Float[Tensor, "B L C"]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        biases = (
            self.transpose_for_scores(bias[None, None]) for bias in (self.q_bias, self.v_bias)
        )
        q, v = ((x + bias).to(k.dtype) for x, bias in zip((q, v), biases, strict=True))
        return q, k, v

    def summands(self) -> int:
        return len(self.pos_att_type)

    def rows(self, tokens: Float[Tensor, "B H L D"]) -> tuple[int, int]:
        reach = self.max_relative_positions
        span = min(tokens.shape[2], reach)
        return reach - span, reach + span - 1

    def bucket(self, offset: Offsets) -> BucketIndex:
        reach = self.max_relative_positions
        return (reach - offset[..., 0].long()).clamp(0, 2 * reach - 1)

    def projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        return (
            self.pos_proj if "c2p" in self.pos_att_type else None,
            self.pos_q_proj if "p2c" in self.pos_att_type else None,
        )

    def relative_positions(self, hidden_states: Tensor) -> Tensor | None:
        if not self.relative_attention:
            return None
        return modeling_deberta.build_relative_position(hidden_states, hidden_states)


def deberta() -> AcceleratedFamily:
    """DeBERTa."""

    def refusal(module: nn.Module) -> str | None:
        if any(getattr(part, "talking_head", False) for part in module.modules()):
            return "talking heads mix the weights of all heads"
        return None

    return AcceleratedFamily(
        title="DeBERTa",
        classes={
            modeling_deberta.DisentangledSelfAttention: DebertaAttention,
            modeling_deberta.DebertaEncoder: DisentangledEncoder,
        },
        shortest=1,
        refusal=refusal,
    )


class DebertaV2Attention(DisentangledAttention):
    """Attention of DeBERTa-v2 and v3: relative positions in buckets."""

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
        back = modeling_deberta_v2.make_log_bucket_position(back, buckets, furthest).long()
    return (back + span).clamp(0, 2 * span - 1)


@lru_cache(256)
def _reached(length: int, *buckets: int) -> tuple[int, int]:
    """The first and the last row that a sequence reads."""
    ends = torch.tensor([[length - 1.0], [1.0 - length]], device="cpu")
    first, last = _bucket(ends, *buckets).tolist()
    return first, last


class DebertaV2Encoding(DisentangledEncoder):
    """The encoder of DeBERTa-v2 and v3, whose embedding of positions has a norm."""

    def get_rel_embedding(self) -> Tensor | None:
        compute: Callable[[], Tensor | None] = super().get_rel_embedding  # type: ignore[misc]
        if not self.relative_attention or "layer_norm" not in self.norm_rel_ebd:
            return compute()
        layers = (self.rel_embeddings, self.LayerNorm)
        embedding: Tensor | None = reused(compute, "relative embedding", layers=layers)
        return embedding


def deberta_v2() -> AcceleratedFamily:
    """DeBERTa-v2 and v3."""
    return AcceleratedFamily(
        title="DeBERTa-v2 and v3",
        classes={
            modeling_deberta_v2.DisentangledSelfAttention: DebertaV2Attention,
            modeling_deberta_v2.DebertaV2Encoder: DebertaV2Encoding,
        },
        shortest=1,
    )
