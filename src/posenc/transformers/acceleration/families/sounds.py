"""Encoders of sounds: conformers, SpeechT5 and WavLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import prod
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.transformers.acceleration.accelerated import (
    KEYS,
    Accelerated,
    AcceleratedFamily,
    wants_weights,
)
from posenc.transformers.acceleration.interface import PositionBias, attention
from posenc.transformers.acceleration.masks import MasksRead, added_mask
from posenc.transformers.acceleration.terms import (
    ComputedOnce,
    bias_by_bucket,
    cached_projection,
    products_by_offset,
)
from posenc.transformers.acceleration.trials import random_ids


class ConformerAttention(Accelerated):
    """Self-attention whose masks are made for posenc's attention interface."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        relative_position_embeddings: Float[Tensor, "1 N C"] | None = None,
        **options: Any,
    ) -> Any:
        short = hidden_states.shape[1] < self.shortest
        dense = attention_mask is not None and attention_mask.dim() > 2
        if short or dense or wants_weights(self, options):
            if relative_position_embeddings is not None:
                options["relative_position_embeddings"] = relative_position_embeddings
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=attention_mask, **options
            )
        layers = self.linear_q, self.linear_k, self.linear_v
        q, k, v = self.in_heads(hidden_states, self.num_heads, *layers)
        tokens, behind = q, q.shape[2] - 1
        if relative_position_embeddings is not None:
            rows = self._rows(relative_position_embeddings)
            tokens, q = (q + x.unsqueeze(1).to(q) for x in (self.pos_bias_v, self.pos_bias_u))
        else:
            left, right = self.left_max_position_embeddings, self.right_max_position_embeddings
            ahead, behind = min(right, behind), min(left, behind)
            index = torch.arange(left - behind, left + ahead + 1, device=q.device)
            rows = self.distance_embedding(index).unsqueeze(0)  # [1, N, D]
        bias = PositionBias((products_by_offset(tokens * self.scaling, rows, behind),))
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attention(
            self, q, k, v, attention_mask, dropout, self.scaling, position_bias=bias, **options
        )
        return self.linear_out(output.flatten(2)), weights

    def _rows(self, embeddings: Float[Tensor, "1 N C"]) -> Float[Tensor, "H N D"]:
        """Projections of relative positions."""

        def project(rows: Float[Tensor, "n C"]) -> Float[Tensor, "H n D"]:
            heads: Tensor = self.linear_pos(rows.unsqueeze(0))[0].unflatten(
                -1, (self.num_heads, -1)
            )
            return heads.transpose(0, 1)

        cached = cached_projection(project, embeddings, 1, layers=(self.linear_pos,))
        return project(embeddings[0]) if cached is None else cached


def _features_and_ids(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Random features of a sound, and ids where the model has a decoder of texts."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    size = (rows, length, config.feature_projection_input_dim)
    made = {"input_features": torch.randn(size, generator=generator)}
    if hasattr(model, "text_decoder"):
        made["decoder_input_ids"] = random_ids(config.vocab_size, (rows, 9), generator)
    return made


def _conformer_family(
    title: str, kind: type[nn.Module], encoder: type[nn.Module], **options: Any
) -> AcceleratedFamily:
    """The family of an encoder whose blocks have attention of this kind."""
    fields: dict[str, Any] = {"classes": {kind: ConformerAttention}, "refusal": _conformer_refusal}
    return AcceleratedFamily(title, configured=(encoder,), masks=KEYS, **fields | options)


def _conformer_refusal(module: Any) -> str | None:
    kind = getattr(module, "position_embeddings_type", module.config.position_embeddings_type)
    if kind in ("relative", "relative_key"):
        return None
    return "no relative positions in its attention, which is PyTorch's own"


def wav2vec2_bert() -> AcceleratedFamily:
    """Wav2Vec2-BERT: a vector for each clipped offset, or Transformer-XL's positions."""
    from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as modeling

    kinds = modeling.Wav2Vec2BertSelfAttention, modeling.Wav2Vec2BertEncoder
    return _conformer_family("Wav2Vec2-BERT", *kinds)


def wav2vec2_conformer() -> AcceleratedFamily:
    """Wav2Vec2-Conformer: Transformer-XL's relative positions."""
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as modeling

    kinds = modeling.Wav2Vec2ConformerSelfAttention, modeling.Wav2Vec2ConformerEncoder
    return _conformer_family("Wav2Vec2-Conformer", *kinds)


def seamless_m4t() -> AcceleratedFamily:
    """SeamlessM4T's encoder of sounds: Transformer-XL's relative positions."""
    from transformers.models.seamless_m4t import modeling_seamless_m4t as modeling

    kinds = modeling.SeamlessM4TConformerSelfAttention, modeling.SeamlessM4TConformerEncoder
    return _conformer_family("SeamlessM4T", *kinds, inputs=_features_and_ids)


class SeamlessV2Encoder(Accelerated):
    """SeamlessM4T v2's encoder, without a mask of all pairs for sounds of one chunk."""

    def _apply_chunk_attention(
        self, attention_mask: Tensor | None, hidden_states: Float[Tensor, "B L C"]
    ) -> Tensor | None:
        if hidden_states.shape[1] <= self.config.speech_encoder_chunk_size:
            return attention_mask
        return super()._apply_chunk_attention(  # type: ignore[misc]
            attention_mask, hidden_states
        )


def seamless_m4t_v2() -> AcceleratedFamily:
    """SeamlessM4T v2's encoder of sounds: a vector for each clipped offset."""
    from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2 as modeling

    def refusal(module: Any) -> str | None:
        if module.config._attn_implementation == "eager":
            return "its eager attention adds 1 to the logits where the mask of chunks lets through"
        return _conformer_refusal(module)

    kinds = modeling.SeamlessM4Tv2ConformerSelfAttention, modeling.SeamlessM4Tv2ConformerEncoder
    classes = dict(zip(kinds, (ConformerAttention, SeamlessV2Encoder), strict=True))
    options: dict[str, Any] = {"classes": classes, "refusal": refusal, "inputs": _features_and_ids}
    return _conformer_family("SeamlessM4T v2", *kinds, **options)


@dataclass(eq=False)
class RelativeKeys(ComputedOnce):
    """Vectors by offset, in place of one for each pair.

    Args:
        rows: for the offsets ``-behind`` …, in order.
        behind: the largest distance to keys before a query that has a row of its own.
        compute: the model's own function, which computes ``[Q, K, D]``.
    """

    rows: Float[Tensor, "1 N D"]
    behind: int
    compute: Callable[[], Tensor]


class AcceleratedSpeechT5Attention(Accelerated):
    """SpeechT5's attention that takes ``RelativeKeys``; with any other it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        position_bias: Tensor | RelativeKeys | None = None,
        **options: Any,
    ) -> Any:
        relative = position_bias if isinstance(position_bias, RelativeKeys) else None
        dense = attention_mask is not None and attention_mask.dim() > 2
        if relative is None or dense or wants_weights(self, options):
            return self.original_forward(
                hidden_states=hidden_states,
                attention_mask=added_mask(attention_mask, hidden_states),
                position_bias=position_bias if relative is None else relative.dense,
                **options,
            )
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = self.in_heads(hidden_states, self.num_heads, *layers)
        bias = PositionBias((products_by_offset(q * self.scaling, relative.rows, relative.behind),))
        dropped = self.dropout if self.training else 0.0
        output, _ = attention(self, q, k, v, attention_mask, dropped, self.scaling, None, bias)
        return self.out_proj(output.flatten(2)), None


class AcceleratedSpeechT5Positions(Accelerated):
    """SpeechT5's vectors by offset."""

    def forward(self, hidden_states: Float[Tensor, "B L C"]) -> Tensor | RelativeKeys:
        length = hidden_states.shape[1]
        dense: Callable[[], Tensor] = partial(self.original_forward, hidden_states=hidden_states)
        if length < self.shortest:
            return dense()
        # The embedding's rows are for query less key, -M … M - 1.
        behind, ahead = min(self.max_length, length) - 1, min(self.max_length, length - 1)
        first, last = self.max_length + behind, self.max_length - ahead
        rows = self.pe_k(torch.arange(first, last - 1, -1, device=hidden_states.device))
        return RelativeKeys(rows.unsqueeze(0), behind, dense)


def _speech(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Random inputs, of the kinds that SpeechT5's encoder and decoder take."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    length = min(length, config.max_text_positions, config.max_speech_positions)

    def values(part: Any, width: int) -> Tensor:
        prenet = getattr(part, "prenet", None)
        if hasattr(prenet, "embed_tokens"):
            return random_ids(config.vocab_size, (rows, length), generator)
        if hasattr(prenet, "feature_encoder"):
            return torch.randn(rows, length * prod(config.conv_stride), generator=generator)
        width = config.hidden_size if prenet is None else width
        return torch.randn(rows, length, width, generator=generator)

    if not hasattr(model, "decoder"):  # an encoder alone
        return {next(iter(signature(model.forward).parameters)): values(model, config.hidden_size)}
    return {
        "input_values": values(model.encoder, config.hidden_size),
        "decoder_input_values": values(model.decoder, config.num_mel_bins),
    }


def speecht5() -> AcceleratedFamily:
    """SpeechT5: a vector for each clipped offset, shared by the encoder's layers, on keys."""
    from transformers.models.speecht5 import modeling_speecht5 as modeling

    def refusal(module: Any) -> str | None:
        decoder = isinstance(module, modeling.SpeechT5Attention) and module.is_decoder
        return "no relative positions in the decoder's attention" if decoder else None

    return AcceleratedFamily(
        title="SpeechT5",
        classes={
            modeling.SpeechT5Attention: AcceleratedSpeechT5Attention,
            modeling.SpeechT5RelativePositionalEncoding: AcceleratedSpeechT5Positions,
        },
        configured=(modeling.SpeechT5Encoder,),
        masks=KEYS,
        refusal=refusal,
        shortest=128,
        inputs=_speech,
    )


@dataclass(eq=False)
class SharedBias(PositionBias):
    """The bias of all layers before their gates, and what their mask says of keys."""

    masks: MasksRead = field(default_factory=MasksRead)


class AcceleratedWavLMAttention(Accelerated):
    """WavLM's attention, which hands its position bias on as a table."""

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

        def dense() -> Tensor:
            bias: Tensor = self.compute_bias(length, length)  # [H, L, L]
            return bias.repeat(batch, 1, 1)

        term = bias_by_bucket(
            self._relative_positions_bucket,
            self.rel_attn_embed,
            self.num_buckets,
            max_distance=self.max_distance,
            device=hidden_states.device,
        )
        return SharedBias((term,), dense)

    def _gated(self, bias: BucketedTerms, hidden_states: Tensor) -> BucketedTerms:
        """The bias times this layer's gates."""
        heads = hidden_states.view(*hidden_states.shape[:2], self.num_heads, -1).transpose(1, 2)
        sums = self.gru_rel_pos_linear(heads).unflatten(-1, (2, 4)).sum(-1)
        first, second = sums.sigmoid().chunk(2, dim=-1)
        gate = first * (second * self.gru_rel_pos_const - 1.0) + 2.0  # [B, H, L, 1]
        product = TokenTableProduct(gate, cast(Tensor, bias.table).unsqueeze(-1))
        return BucketedTerms(bias.bucket, left=product, max_distance=bias.max_distance)


def wavlm() -> AcceleratedFamily:
    """WavLM: T5's buckets, one table for all layers, times a gate for each query and head."""
    from transformers.models.wavlm.modeling_wavlm import WavLMAttention

    return AcceleratedFamily("WavLM", {WavLMAttention: AcceleratedWavLMAttention}, shortest=256)
