"""Funnel: products of queries and relative positions, token types, and pooled queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.funnel.modeling_funnel import (
    FunnelAttentionStructure,
    FunnelRelMultiheadAttention,
)

from posenc.encoding import LowRank, StructuredScore
from posenc.encoding.prepared import is_plain, reused_later
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_scripted, is_transformed, needs_dispatch
from posenc.transformers.acceleration.accelerated import Accelerated, AcceleratedFamily
from posenc.transformers.acceleration.masks import MasksRead
from posenc.transformers.acceleration.terms import (
    FURTHEST,
    Movable,
    cached_projection,
    products_by_offset,
)

MOST_TYPES = 16
"""Numbers of token types up to which posenc computes: each widens queries and keys by one."""

CLASS_TYPE = FunnelAttentionStructure.cls_token_type_id


@dataclass(frozen=True, eq=False)
class TokenTypes(Movable):
    """Types of queries and keys, in place of a bool for each pair, pooled as the tokens are.

    Args:
        query: ``[B, Q]``; key: ``[B, K]``. ``CLASS_TYPE`` is of one type with every other.
        kinds: the types there are but for ``CLASS_TYPE``; none where these are one or none.
        masks: of the pass, pooled ones too.
    """

    query: Int[Tensor, "B Q"]
    key: Int[Tensor, "B K"]
    kinds: Int[Tensor, " S"]
    masks: MasksRead = field(default_factory=MasksRead)

    @property
    def same(self) -> Bool[Tensor, "B Q K"]:
        """True for pairs of one type."""
        query, key = self.query.unsqueeze(2), self.key.unsqueeze(1)
        return (query == key) | (query == CLASS_TYPE) | (key == CLASS_TYPE)

    def factors(
        self, same: Float[Tensor, "B H Q"], other: Float[Tensor, "B H Q"]
    ) -> tuple[Float[Tensor, "B H Q S"], Float[Tensor, "B 1 K S"], Float[Tensor, "B H Q"]]:
        """The logits, ``same`` for pairs of one type and ``other`` for the rest, as a sum.

        Returns:
            Columns beside the queries and beside the keys, and a summand of each query.
        """
        if not len(self.kinds):
            return same.new_zeros(*same.shape, 0), same.new_zeros(1, 1, self.key.shape[1], 0), same
        free = self.query == CLASS_TYPE
        query = (self.query.unsqueeze(-1) == self.kinds) & ~free.unsqueeze(-1)  # [B, Q, S]
        key = (self.key.unsqueeze(-1) == self.kinds) | (self.key == CLASS_TYPE).unsqueeze(-1)
        columns = (same - other).unsqueeze(-1) * query.unsqueeze(1)
        return columns, key.unsqueeze(1).to(same), torch.where(free.unsqueeze(1), same, other)


class FunnelStructure(Accelerated, FunnelAttentionStructure):
    """Inputs of all layers, with types by token instead of masks of all pairs for long inputs."""

    def init_attention_inputs(
        self,
        inputs_embeds: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
    ) -> tuple[Any, ...]:
        types = None
        if inputs_embeds.shape[1] >= self.shortest and token_type_ids is not None:
            types = _types(token_type_ids)
        if types is None:
            return super().init_attention_inputs(inputs_embeds, attention_mask, token_type_ids)
        self.pooling_mult = 1
        self.seq_len = length = inputs_embeds.shape[1]
        rows = self.get_position_embeds(length, inputs_embeds.dtype, inputs_embeds.device)
        return rows, types, attention_mask, None

    def get_position_embeds(
        self, seq_len: int, dtype: torch.dtype, device: torch.device
    ) -> list[list[Tensor | None]]:
        compute, config = super().get_position_embeds, self.config
        if needs_dispatch() or is_scripted() or is_transformed() or seq_len > FURTHEST:
            return compute(seq_len, dtype, device)
        if not (is_plain(self.sin_dropout) and is_plain(self.cos_dropout)):
            return compute(seq_len, dtype, device)
        pooling = config.separate_cls, config.truncate_seq, config.num_blocks
        kind = (dtype, device, config.d_model, *pooling)
        with self.prepared:
            longest = reused_later(
                lambda: compute(FURTHEST, dtype, device), "Funnel positions", *kind
            )
        if longest is None:
            return compute(seq_len, dtype, device)
        lengths = zip(self._lengths(seq_len), self._lengths(FURTHEST), strict=True)
        rows, keys = [], seq_len
        for (alike, pooled), (queries, most) in zip(longest, lengths, strict=True):
            skipped = most - queries  # tables begin as many strides ahead as there are queries
            between = pooled if pooled is None else pooled[2 * skipped :][: 2 * queries + keys]
            rows.append([alike[skipped:][: 2 * queries], between])
            keys = queries
        return rows

    def _lengths(self, length: int) -> Iterator[int]:
        """The sequence length in each block."""
        tokens = list(range(length))
        for block in range(self.config.num_blocks):
            tokens = self.stride_pool_pos(tokens, block) if block else tokens
            yield len(tokens)

    def stride_pool(self, tensor: Any, axis: int | Sequence[int]) -> Any:
        pool = super().stride_pool
        if not isinstance(tensor, TokenTypes):
            return pool(tensor, axis)
        axes = [axis] if isinstance(axis, int) else axis
        query, key = (
            pool(types, 1) if side in axes else types
            for side, types in ((1, tensor.query), (2, tensor.key))
        )
        return replace(tensor, query=query, key=key)


class FunnelAttention(Accelerated, FunnelRelMultiheadAttention):
    """Attention where the model hands on ``TokenTypes``; elsewhere as it was."""

    def forward(
        self,
        query: Float[Tensor, "B Q C"],
        key: Float[Tensor, "B K C"],
        value: Float[Tensor, "B K C"],
        attention_inputs: tuple[Any, ...],
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        embeddings, types, attention_mask, class_mask = attention_inputs
        queries, keys = query.shape[1], key.shape[1]
        stride = 1 if queries == keys else 2
        if isinstance(types, TokenTypes):
            rows = embeddings[self.block_index][stride - 1]
            fits = rows is not None and len(rows) == stride * queries + keys
            served = not output_attentions and keys >= self.shortest and fits
            attended: Tensor | None = None
            fewest: int | None = keys
            if served and attention_mask is not None:
                attended, fewest = types.masks.keys(attention_mask, lambda mask: mask >= 1)
            if served and fewest != 0:  # pooling may hide all keys of a row that has tokens
                output = self._attend(query, key, value, rows, types, attended, stride)
                output = self.hidden_dropout(self.post_proj(output))
                return (self.layer_norm(query + output),)
            if self.config.separate_cls:
                class_mask = pad(query.new_ones(queries - 1, keys - 1), (1, 0, 1, 0))
            attention_inputs = (embeddings, types.same, attention_mask, class_mask)
        return self.original_forward(
            query=query,
            key=key,
            value=value,
            attention_inputs=attention_inputs,
            output_attentions=output_attentions,
            **options,
        )

    def _attend(
        self,
        query: Float[Tensor, "B Q C"],
        key: Float[Tensor, "B K C"],
        value: Float[Tensor, "B K C"],
        rows: Float[Tensor, "P C"],
        types: TokenTypes,
        attended: Bool[Tensor, "B K"] | None,
        stride: int,
    ) -> Float[Tensor, "B Q E"]:
        """Attention of queries ``stride`` keys apart, heads merged."""
        heads, queries, keys = self.config.n_head, query.shape[1], key.shape[1]
        q, k, v = (
            projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection, x in ((self.q_head, query), (self.k_head, key), (self.v_head, value))
        )
        # Row p holds the position that is ``p - stride · Q`` keys after a query.
        cached = cached_projection(self._project, rows, 0, weights=(self.r_kernel,))
        projected = self._project(rows) if cached is None else cached
        position, typed = (
            ((q + bias.unsqueeze(1)) * self.scale).to(q.dtype)  # autocast casts no sums
            for bias in (self.r_r_bias, self.r_s_bias)
        )
        other, same = torch.einsum("bhqd,shd->sbhq", typed, self.seg_embed)
        of_query, of_key, rest = types.factors(same, other)
        if self.config.separate_cls:  # neither term is there for pairs with the class token
            tokens = torch.arange(queries, device=q.device)
            others = (tokens > 0).to(q)
            position, of_query = (x * others.unsqueeze(-1) for x in (position, of_query))
            to_class = projected[:, stride * (queries - tokens)]
            rest = rest * others + (position * to_class).sum(-1)
            place = (torch.arange(keys, device=q.device) == 0).to(q).view(1, 1, -1, 1)
            of_query = torch.cat([of_query, -rest.unsqueeze(-1)], dim=-1)
            of_key = torch.cat([of_key * (1 - place), place.expand(len(of_key), -1, -1, -1)], -1)
        biased = (q + self.r_w_bias.unsqueeze(1)).to(q.dtype)
        if stride > 1:  # the queries between, which are left out of the output, are zero
            biased, position, of_query = (_spread(x, stride) for x in (biased, position, of_query))
        terms: list[StructuredScore] = [products_by_offset(position, projected, stride * queries)]
        if of_query.shape[-1]:
            terms.append(LowRank(of_query, of_key))
        of_queries, of_keys = (Layout.sequence(x.shape[2], device=q.device) for x in (biased, k))
        if attended is not None:
            of_keys = replace(of_keys, valid=attended)
        grid, dropped = Grid(of_queries, of_keys), self.attention_dropout.p
        output = self.attend(biased, k, v, grid, *terms, dropout=dropped, scale=self.scale)
        return output[:, :, ::stride].transpose(1, 2).flatten(2)

    def _project(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "H n D"]:
        return torch.einsum("pc,chd->hpd", rows, self.r_kernel)


def _spread(x: Float[Tensor, "B H Q N"], stride: int) -> Float[Tensor, "B H L N"]:
    """Each row followed by ``stride - 1`` rows of zeros."""
    return pad(x.unsqueeze(3), (0, 0, 0, stride - 1)).flatten(2, 3)


def _types(token_type_ids: Int[Tensor, "B L"]) -> TokenTypes | None:
    """Types of a sequence; None where they have no values to read, or of too many."""
    if not has_values(token_type_ids):
        return None
    kinds = torch.unique(token_type_ids)
    kinds = kinds[kinds != CLASS_TYPE]
    if len(kinds) > MOST_TYPES:
        return None
    return TokenTypes(token_type_ids, token_type_ids, kinds if len(kinds) > 1 else kinds[:0])


def _refusal(module: nn.Module) -> str | None:
    if module.config.attention_type != "relative_shift":  # type: ignore[union-attr]
        return "its positions are factorized"
    return None


ENTRY = AcceleratedFamily(
    title="Funnel",
    classes={
        FunnelAttentionStructure: FunnelStructure,
        FunnelRelMultiheadAttention: FunnelAttention,
    },
    refusal=_refusal,
)
