"""XLNet: products of queries and relative positions, segments, and memories of earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from posenc.encoding import LowRank, StructuredScore
from posenc.encoding.prepared import reused_later
from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import (
    Accelerated,
    AcceleratedFamily,
    wants_weights,
)
from posenc.transformers.acceleration.masks import fewest_attended, grid_of
from posenc.transformers.acceleration.terms import (
    FURTHEST,
    Movable,
    cached_projection,
    products_by_offset,
)

MOST_SEGMENTS = 16
"""Numbers of segments up to which posenc computes: each widens queries and keys by one."""


@dataclass(frozen=True, eq=False)
class Memory(Movable):
    """Hidden states of earlier tokens for one layer, and what the layer's masks are made of.

    The model hands it to its layers in place of the states, so that no mask of all pairs is made.

    Args:
        states: of the earlier tokens, the first of the keys; None: there are none.
        attended: False for padding; None: no padding.
        segments: ``[B, K, S]``, 1 at each key's segment; None: no segments.
        causal: each query sees the keys up to itself.
        window: of these, it sees that many; None: all.
    """

    states: Float[Tensor, "M B C"] | None
    attended: Bool[Tensor, "B K"] | None
    segments: Float[Tensor, "B K S"] | None
    causal: bool
    window: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the states, tokens first."""
        return (0,) if self.states is None else tuple(self.states.shape)

    def rows(self, batch: slice) -> Memory:
        """Masks of some batch rows."""
        attended = None if self.attended is None else self.attended[batch]
        segments = None if self.segments is None else self.segments[batch]
        return replace(self, attended=attended, segments=segments)


@dataclass(frozen=True, eq=False)
class Stream:
    """Stand-in for the mask of the content stream or of the query stream.

    Args:
        memory: from the model.
        content: a query of the content stream sees itself, even if it is padding.
        rows: projected positions, kept from earlier calls; None: those that attention is given.
    """

    memory: Memory
    content: bool
    rows: Float[Tensor, "H P D"] | None


class XLNetAttention(Accelerated, XLNetRelativeAttention):
    """Attention of both streams where the model hands on a ``Memory``; elsewhere as it was."""

    def forward(
        self,
        h: Float[Tensor, "Q B C"],
        g: Float[Tensor, "G B C"] | None,
        attn_mask_h: Tensor | Stream | None,
        attn_mask_g: Tensor | Stream | None,
        r: Float[Tensor, "P B C"],
        seg_mat: Tensor | None,
        mems: Tensor | Memory | None = None,
        **options: Any,
    ) -> Any:
        if isinstance(mems, Memory):
            cached = None
            if r.stride(1) == 0 or r.shape[1] == 1:  # batch rows share it
                cached = cached_projection(self._project, r, 0, weights=(self.r,))
                r = r[:, :1] if cached is None else r[:0, :1]  # none are left to project
            attn_mask_h, attn_mask_g = (Stream(mems, content, cached) for content in (True, False))
            mems = mems.states
        inputs = {"attn_mask_h": attn_mask_h, "attn_mask_g": attn_mask_g, "seg_mat": seg_mat}
        return self.original_forward(h=h, g=g, r=r, mems=mems, **inputs, **options)

    def _project(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "H n D"]:
        return torch.einsum("pc,chd->hpd", rows.type(self.r.dtype), self.r)

    def rel_attn_core(
        self,
        q_head: Float[Tensor, "Q B H D"],
        k_head_h: Float[Tensor, "K B H D"],
        v_head_h: Float[Tensor, "K B H D"],
        k_head_r: Float[Tensor, "P b H D"],
        seg_mat: Tensor | None = None,
        attn_mask: Tensor | Stream | None = None,
        output_attentions: bool = False,
    ) -> Any:
        if not isinstance(attn_mask, Stream):
            return super().rel_attn_core(
                q_head, k_head_h, v_head_h, k_head_r, seg_mat, attn_mask, output_attentions
            )
        q, k, v, rows = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h, k_head_r))
        memory, content = attn_mask.memory, attn_mask.content
        rows = rows if attn_mask.rows is None else attn_mask.rows.unsqueeze(0)
        if len(rows) == 1:
            output = self._attend(q, k, v, rows[0], memory, content=content)
        else:  # dropout or bi_data gives each batch row its own
            one = [slice(b, b + 1) for b in range(len(q))]
            output = torch.cat(
                [
                    self._attend(q[b], k[b], v[b], rows[b][0], memory.rows(b), content=content)
                    for b in one
                ]
            )
        return output.permute(2, 0, 1, 3)

    def _attend(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B H K D"],
        v: Float[Tensor, "B H K D"],
        rows: Float[Tensor, "H P D"],
        memory: Memory,
        *,
        content: bool,
    ) -> Float[Tensor, "B H Q D"]:
        queries, keys = q.shape[2], k.shape[2]
        past = keys - queries
        segments = memory.segments if memory.segments is None else memory.segments.unsqueeze(1)
        biased = (q + self.r_w_bias.unsqueeze(1)).to(q.dtype)  # autocast casts no sums
        position = ((q + self.r_r_bias.unsqueeze(1)) * self.scale).to(q.dtype)
        terms: list[StructuredScore] = [products_by_offset(position, rows, keys)]
        segment = q.new_zeros(())
        if segments is not None:  # up to a constant of the query, for keys of its segment
            difference = (self.seg_embed[0] - self.seg_embed[1]).unsqueeze(1)
            segment = ((q + self.r_s_bias.unsqueeze(1)) * difference).sum(-1) * self.scale
            of_query = segment.unsqueeze(-1) * segments[:, :, past:]
        new_values, attended, slot = v[:, :, past:], memory.attended, None
        if attended is not None and content:
            # The place of a padded key is taken by one that is each padded query's own: its value
            # is a further feature, the weight by which the query's own value is to be added.
            slot = _slots(attended)
            at = slot.int().argmax(1, keepdim=True)
            back = at - torch.arange(past, keys, device=q.device)  # [B, Q], offsets
            row = rows[:, (back + keys).clamp(0, rows.shape[1] - 1)].transpose(0, 1)  # [B, H, Q, D]
            difference = (position * (rows[:, keys].unsqueeze(1) - row)).sum(-1)
            itself = (biased * k[:, :, past:]).sum(-1) * self.scale + segment + difference
            none = max(torch.finfo(q.dtype).min / 4, -1e30)
            itself = itself.masked_fill(attended[:, None, past:], none)
            place = slot[:, None, :, None]
            k = k.masked_fill(place, 0.0)
            v = torch.cat([v.masked_fill(place, 0.0), place.to(v).expand(*v.shape[:3], 1)], dim=-1)
            terms.append(LowRank(itself.unsqueeze(-1), place.to(q)))
            attended = attended | slot
            segments = segments if segments is None else segments.masked_fill(place, 0.0)
        if segments is not None:
            terms.append(LowRank(of_query, segments))
        grid = grid_of(queries, keys, attended, causal=memory.causal, device=q.device)
        grid, dropped = replace(grid, window=memory.window), self.dropout.p
        output = self.attend(biased, k, v, grid, *terms, dropout=dropped, scale=self.scale)
        if slot is None:
            return output
        return output[..., :-1] + output[..., -1:] * new_values


class XLNetStreams(Accelerated, XLNetModel):
    """The model, which hands a ``Memory`` to each layer instead of masks of all pairs."""

    def forward(
        self,
        input_ids: Int[Tensor, "B Q"] | None = None,
        attention_mask: Tensor | None = None,
        mems: Any = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> Any:
        masks = (attention_mask, options.get("input_mask"))
        tokens = options.get("inputs_embeds") if input_ids is None else input_ids
        memories, use_original = None, perm_mask is not None or wants_weights(self, options)
        if not (use_original or tokens is None or None not in masks):
            queried = target_mapping is not None
            memories = self._memories(tokens, masks, mems, token_type_ids, queried=queried)
        if memories is not None:
            options["input_mask"] = attention_mask = token_type_ids = None
            mems = memories
        return self.original_forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            mems=mems,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            token_type_ids=token_type_ids,
            **options,
        )

    def relative_positional_encoding(
        self, qlen: int, klen: int, bsz: int | None = None, device: torch.device | None = None
    ) -> Float[Tensor, "P B C"]:
        compute, table = super().relative_positional_encoding, None
        if not self.bi_data and has_values(self.mask_emb) and klen <= FURTHEST:
            table = reused_later(
                lambda: compute(FURTHEST, FURTHEST, device=device),
                *("XLNet positions", self.attn_type, self.clamp_len, self.d_model, device),
                layers=(self.dropout,),
            )
        if table is None:
            return compute(qlen, klen, bsz, device)
        count = klen + (qlen if self.attn_type == "bi" else 1)
        rows: Tensor = table.narrow(0, FURTHEST - klen, count)
        return rows.expand(-1, 1 if bsz is None else bsz, -1)

    def cache_mem(self, curr_out: Tensor, prev_mem: Tensor | Memory | None) -> Tensor:
        states = prev_mem.states if isinstance(prev_mem, Memory) else prev_mem
        return super().cache_mem(curr_out, states)

    def _memories(
        self,
        tokens: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        mems: Any,
        token_types: Tensor | None,
        *,
        queried: bool,
    ) -> list[Memory] | None:
        """One a layer; None for a call that the layers' own attention computes.

        Args:
            masks: 1 for tokens, or 1 for padding.
            queried: there is a query stream.
        """
        states = [None] * len(self.layer) if mems is None else list(mems)
        past = 0 if states[0] is None else states[0].shape[0]
        batch, length = tokens.shape[:2]
        halved = self.bi_data and batch % 2  # positions are of half the rows, and of the other
        if past + length < self.shortest or halved:
            return None
        attended = _attended(*masks)
        if attended is not None:
            if attended.shape != (batch, length):
                return None
            attended = torch.cat([attended.new_ones(batch, past), attended], dim=1)
        causal = self.attn_type == "uni"
        if attended is not None:
            fewest = fewest_attended(attended)
            if fewest == past + length:
                attended = None
            elif causal or (queried and not fewest):
                return None
        segments = None
        if token_types is not None:
            segments = _segments(token_types, past)
            if segments is None:
                return None
            segments = segments.to(self.dtype)
        window = past + 1 if causal and self.same_length else None
        return [Memory(state, attended, segments, causal, window) for state in states]


def _attended(
    attention_mask: Tensor | None, input_mask: Tensor | None
) -> Bool[Tensor, "B Q"] | None:
    """False for padding, by a mask that is 1 for tokens or by one that is 1 for padding."""
    if attention_mask is not None:
        return attention_mask >= 1
    return None if input_mask is None else input_mask <= 0


def _segments(token_types: Int[Tensor, "B Q"], past: int) -> Int[Tensor, "B K S"] | None:
    """1 at the segment of each token; None where types have no values to read, or of too many."""
    if not has_values(token_types):
        return None
    numbers, inverse = torch.unique(pad(token_types, (past, 0)), return_inverse=True)
    return None if len(numbers) > MOST_SEGMENTS else one_hot(inverse, len(numbers))


def _slots(attended: Bool[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
    """One padded key a batch row that has any, beside one that is attended to if there is one."""
    near_attended = torch.zeros_like(attended)
    near_attended[:, 1:] |= attended[:, :-1]
    near_attended[:, :-1] |= attended[:, 1:]
    rank = (~attended).int() * (1 + near_attended.int())
    chosen = rank.argmax(1, keepdim=True) == torch.arange(attended.shape[1], device=rank.device)
    return chosen & ~attended


ENTRY = AcceleratedFamily(
    title="XLNet", classes={XLNetRelativeAttention: XLNetAttention, XLNetModel: XLNetStreams}
)
