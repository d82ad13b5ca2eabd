"""SpeechT5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    SpeechT5Config,
    SpeechT5ForSpeechToText,
    SpeechT5ForTextToSpeech,
    SpeechT5Model,
)

from tests.transformers.acceleration.case import AUDIO, VOCABULARY, Case, sounds, texts

SIZES: dict[str, Any] = AUDIO | {
    "vocab_size": VOCABULARY,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "encoder_layerdrop": 0.0,
    "encoder_max_relative_position": 6,
    "decoder_layers": 1,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 32,
    "decoder_layerdrop": 0.0,
    "num_mel_bins": 5,
    "speech_decoder_prenet_units": 8,
    "speech_decoder_prenet_dropout": 0.0,
    "speech_decoder_postnet_units": 8,
}


def make(**options: Any) -> PreTrainedModel:
    return SpeechT5Model(SpeechT5Config(**SIZES | options))


def states() -> dict[str, Tensor]:
    """Two rows of features, padded on either side, and two rows to be generated."""
    generator = torch.Generator().manual_seed(1)
    attended = texts()["attention_mask"]
    values = torch.randn(*attended.shape, 24, generator=generator)
    decoded = torch.randn(2, 9, 24, generator=generator)
    return {"input_values": values, "attention_mask": attended, "decoder_input_values": decoded}


def whole_states() -> dict[str, Tensor]:
    return {name: x for name, x in states().items() if name != "attention_mask"}


def dictation() -> dict[str, Tensor]:
    return sounds() | {"decoder_input_ids": texts(9)["input_ids"]}


def reading() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    spectrum = torch.randn(2, 8, 5, generator=generator)
    return texts() | {"decoder_input_values": spectrum}


CASES = {
    "model": Case(make, states, accelerated=3),
    "whole": Case(make, whole_states, accelerated=3),
    "long_reach": Case(lambda: make(encoder_max_relative_position=160), states, accelerated=3),
    "speech_to_text": Case(
        lambda: SpeechT5ForSpeechToText(SpeechT5Config(**SIZES)), dictation, accelerated=3
    ),
    "text_to_speech": Case(
        lambda: SpeechT5ForTextToSpeech(SpeechT5Config(**SIZES)), reading, accelerated=3
    ),
}
