"""SpeechT5: a vector for each clipped offset, shared by the encoder's layers, on keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.speecht5.modeling_speecht5 import (
    SpeechT5Attention,
    SpeechT5Encoder,
    SpeechT5RelativePositionalEncoding,
)

from posenc.transformers.acceleration.accelerated import KEYS, Accelerated, wants_weights
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.interface import PositionBias, attention
from posenc.transformers.acceleration.masks import added_mask
from posenc.transformers.acceleration.terms import ComputedOnce, products_by_offset
from posenc.transformers.acceleration.trials import random_ids


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


class AcceleratedSpeechT5Attention(Accelerated, SpeechT5Attention):
    """The encoder's attention, which takes ``RelativeKeys``; with any other it runs as it did."""

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


class AcceleratedSpeechT5Positions(Accelerated, SpeechT5RelativePositionalEncoding):
    """Vectors by offset."""

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


def refusal(module: Any) -> str | None:
    """The reason why a module stays as it is, or None."""
    decoder = isinstance(module, SpeechT5Attention) and module.is_decoder
    return "no relative positions in the decoder's attention" if decoder else None


def inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Random inputs, of the kinds that the encoder and the decoder take."""
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


ENTRY = AcceleratedFamily(
    title="SpeechT5",
    classes={
        SpeechT5Attention: AcceleratedSpeechT5Attention,
        SpeechT5RelativePositionalEncoding: AcceleratedSpeechT5Positions,
    },
    configured=(SpeechT5Encoder,),
    masks=KEYS,
    refusal=refusal,
    shortest=128,
    inputs=inputs,
)
