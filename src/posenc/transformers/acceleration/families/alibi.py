"""ALiBi, in decoders that compute attention by themselves: Bloom, Falcon and MPT."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers import AttentionMaskInterface

from posenc.encoding import BucketedTerms
from posenc.transformers.acceleration.accelerated import (
    CAUSAL_KEYS,
    Accelerated,
    AcceleratedFamily,
    config_behind,
    wants_weights,
)
from posenc.transformers.acceleration.interface import keys_mask
from posenc.transformers.acceleration.masks import added_causal_mask, grid_of


class AlibiAttention(Accelerated):
    """Causal attention with ALiBi."""

    def attend_alibi(
        self,
        q: Float[Tensor, "B H Q D"],
        k: Float[Tensor, "B G K D"],
        v: Float[Tensor, "B G K D"],
        bias: Float[Tensor, "b H K"],
        attended: Bool[Tensor, "B K"] | None,
        *,
        dropout: float,
        scale: float,
    ) -> Float[Tensor, "B Q C"]:
        """Attention of the last Q of K tokens, heads merged.

        Args:
            bias: as the model made it: of a query's keys, only differences matter.
            attended: False for padding. A query that sees no key gets the mean of all values, as
                under a mask that adds the lowest number.
            dropout: nothing is dropped in evaluation mode.
        """
        term = BucketedTerms(lambda offset: torch.zeros_like(offset[..., 0].long()), column=bias)
        grid = grid_of(q.shape[2], k.shape[2], attended, causal=True, device=q.device)
        output = self.attend(q, k, v, grid, term, dropout=dropout, scale=scale)
        if attended is not None:
            nonempty = attended.cumsum(1)[:, -q.shape[2] :] > 0
            output = torch.where(nonempty[:, None, :, None], output, v.mean(dim=2, keepdim=True))
        return output.transpose(1, 2).flatten(2)


class BloomAlibi(AlibiAttention):
    """Bloom's attention, whose masks are those of posenc."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        residual: Float[Tensor, "B Q C"],
        alibi: Float[Tensor, "BH 1 K"],
        attention_mask: Tensor | None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        queries, keys = hidden_states.shape[1], alibi.shape[-1]
        pairs = attention_mask is not None and attention_mask.dim() > 2
        if pairs or keys < self.shortest or wants_weights(self, options):
            mask = added_causal_mask(attention_mask, queries, keys, like=hidden_states)
            inputs = {"residual": residual, "alibi": alibi, "attention_mask": mask}
            return self.original_forward(
                hidden_states=hidden_states, cache=cache, **inputs, **options
            )
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        bias = alibi.reshape(-1, self.num_heads, keys)
        dropped, scale = self.attention_dropout.p, self.inv_norm_factor
        output = self.attend_alibi(q, k, v, bias, attention_mask, dropout=dropped, scale=scale)
        output = drop(self.dense(output), self.hidden_dropout, self.training)
        return residual + output, None


def bloom() -> AcceleratedFamily:
    """Bloom."""
    from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel

    def refusal(module: nn.Module) -> str | None:
        settings: Any = getattr(module, "config", module)
        if settings.pretraining_tp > 1 and settings.slow_but_exact:
            return "slow_but_exact asks for the sums of its own projection"
        return None

    return AcceleratedFamily(
        title="Bloom",
        classes={BloomAttention: BloomAlibi},
        configured=(BloomModel,),
        masks=CAUSAL_KEYS,
        refusal=refusal,
    )


class FalconAlibi(AlibiAttention):
    """Falcon's attention, whose masks are those of posenc."""

    config = property(lambda module: config_behind(module.__dict__["config"]))
    """The model's config, by which the original attention chooses its implementation."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        alibi: Float[Tensor, "b ..."],
        attention_mask: Tensor | None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, queries = hidden_states.shape[:2]
        bias = alibi.reshape(batch, self.num_heads, -1) * self.inv_norm_factor
        pairs = attention_mask is not None and attention_mask.dim() > 2
        if pairs or bias.shape[-1] < self.shortest or wants_weights(self, options):
            if not pairs:  # the model has the bias in its masks
                mask = added_causal_mask(
                    attention_mask, queries, bias.shape[-1], like=hidden_states
                )
                lowest = torch.finfo(mask.dtype).min
                attention_mask = bias.unsqueeze(2).masked_fill(mask < 0, lowest)
            inputs = {"alibi": alibi, "attention_mask": attention_mask}
            return self.original_forward(
                hidden_states=hidden_states, cache=cache, **inputs, **options
            )
        qkv = self._split_heads(self.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in qkv)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # Eager attention adds the bias to the logits and the mask, which has it already.
        times = 1 if self.config._attn_implementation == "sdpa" else 2
        bias, dropped, scale = bias * times, self.attention_dropout.p, self.inv_norm_factor
        output = self.attend_alibi(q, k, v, bias, attention_mask, dropout=dropped, scale=scale)
        return self.dense(output), None


def falcon() -> AcceleratedFamily:
    """Falcon with ALiBi (falcon-rw)."""
    from transformers.models.falcon.modeling_falcon import FalconAttention, FalconModel

    def refusal(module: Any) -> str | None:
        if module.config.alibi:
            return None
        return "its positions are rotary; PyTorch's attention computes them as fast"

    return AcceleratedFamily(
        title="Falcon with ALiBi",
        classes={FalconAttention: FalconAlibi},
        configured=(FalconModel,),
        masks=CAUSAL_KEYS,
        refusal=refusal,
    )


MPT_MASKS = "posenc_mpt"
causal_keys = keys_mask(causal=True)


def hidden_keys(*arguments: Any, **options: Any) -> Bool[Tensor, "..."]:
    """A mask that is True for what is hidden, and never None: MPT converts its dtype.

    Returns:
        ``[0]`` without padding and ``[B, K]`` with it under causal masks; else ``[B, 1, Q, K]``.
    """
    visible = causal_keys(*arguments, **options)
    return (
        torch.zeros(0, dtype=torch.bool, device=options["device"]) if visible is None else ~visible
    )


AttentionMaskInterface.register(MPT_MASKS, hidden_keys)


class MptAlibi(AlibiAttention):
    """MPT's attention, whose masks are those of ``hidden_keys``."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        position_bias: Float[Tensor, "H 1 L"],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        queries = hidden_states.shape[1]
        keys = queries + (0 if cache is None else int(cache.get_seq_length(self.layer_idx)))
        unserved = keys < self.shortest or keys > position_bias.shape[-1]
        if unserved or attention_mask is None or attention_mask.dim() > 2:
            if attention_mask is not None:
                attention_mask = hidden_pairs(attention_mask, queries, keys)
            inputs = {"position_bias": position_bias, "attention_mask": attention_mask}
            return self.original_forward(
                hidden_states=hidden_states, cache=cache, **inputs, **options
            )
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        bias = position_bias[:, 0, -keys:].unsqueeze(0)
        attended = ~attention_mask if attention_mask.dim() == 2 else None
        dropped, scale = self.attn_dropout_p, self.softmax_scale
        output = self.attend_alibi(q, k, v, bias, attended, dropout=dropped, scale=scale)
        return self.out_proj(output), None


class AcceleratedMptBlock(Accelerated):
    """MPT's block, the only module that gets the option to return weights."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        attention_mask: Tensor,
        cache: Any = None,
        **options: Any,
    ) -> Any:
        if wants_weights(self, options):
            queries, index = hidden_states.shape[1], self.attn.layer_idx
            keys = queries + (0 if cache is None else int(cache.get_seq_length(index)))
            attention_mask = hidden_pairs(attention_mask, queries, keys)
        inputs = {"hidden_states": hidden_states, "attention_mask": attention_mask}
        return self.original_forward(cache=cache, **inputs, **options)


def hidden_pairs(hidden: Bool[Tensor, "..."], queries: int, keys: int) -> Bool[Tensor, "b 1 Q K"]:
    """A mask of ``hidden_keys`` for all pairs."""
    if hidden.dim() > 2:
        return hidden
    attended = ~hidden if hidden.dim() == 2 else None
    return ~grid_of(queries, keys, attended, causal=True, device=hidden.device).visible


def mpt() -> AcceleratedFamily:
    """MPT."""
    from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, MptModel

    return AcceleratedFamily(
        title="MPT",
        classes={MptAttention: MptAlibi, MptBlock: AcceleratedMptBlock},
        configured=(MptModel,),
        masks=MPT_MASKS,
    )
