"""Models of sounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

from tests.transformers.acceleration.case import ENCODER, VOCABULARY, Case, of, texts
from tests.transformers.acceleration.cases.texts import EAGER

AUDIO: dict[str, Any] = ENCODER | {"vocab_size": VOCABULARY, "conv_dim": (8, 8)}
AUDIO |= {"conv_stride": (8, 4), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4}
AUDIO |= {"num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False}
AUDIO |= {"mask_time_prob": 0.0}

WAVLM: dict[str, Any] = AUDIO | {"num_buckets": 8, "max_bucket_distance": 16}
RELATIVE = {"position_embeddings_type": "relative"}
CONFORMER: dict[str, Any] = AUDIO | RELATIVE | {"conv_depthwise_kernel_size": 3}
REACH = {"left_max_position_embeddings": 5, "right_max_position_embeddings": 3}
BERT: dict[str, Any] = CONFORMER | REACH | {"feature_projection_input_dim": 10}
BERT |= {"position_embeddings_type": "relative_key"}

DECODER = {"decoder_layers": 1, "decoder_attention_heads": 3, "decoder_ffn_dim": 32}
DECODER |= {"decoder_layerdrop": 0.0}
SPEECH: dict[str, Any] = AUDIO | DECODER | {"encoder_layers": 2, "encoder_attention_heads": 3}
SPEECH |= {"encoder_ffn_dim": 32, "encoder_layerdrop": 0.0, "encoder_max_relative_position": 6}
SPEECH |= {"num_mel_bins": 5, "speech_decoder_prenet_units": 8}
SPEECH |= {"speech_decoder_prenet_dropout": 0.0, "speech_decoder_postnet_units": 8}

SEAMLESS: dict[str, Any] = DECODER | {"vocab_size": VOCABULARY, "hidden_size": 24}
SEAMLESS |= {"feature_projection_input_dim": 10, "speech_encoder_layers": 2}
SEAMLESS |= {"speech_encoder_attention_heads": 3, "speech_encoder_intermediate_size": 32}
SEAMLESS |= {"speech_encoder_layerdrop": 0.0, "encoder_layers": 1, "encoder_attention_heads": 3}
SEAMLESS |= {"encoder_ffn_dim": 32, "encoder_layerdrop": 0.0}
SEAMLESS |= {"conv_depthwise_kernel_size": 3, "max_position_embeddings": 64}
SEAMLESS |= {"max_source_positions": 64}
SEAMLESS_V2: dict[str, Any] = SEAMLESS | REACH


def without(inputs: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if name not in names}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sounds(length: int = 800) -> dict[str, Tensor]:
    """Two rows of samples, one of them padded."""
    values = drawn(2, length)
    attended = torch.ones_like(values, dtype=torch.long)
    attended[1, -200:] = 0
    return {"input_values": values, "attention_mask": attended}


def whole_sounds(length: int = 800) -> dict[str, Tensor]:
    """Two rows of samples without padding."""
    return without(sounds(length), "attention_mask")


def features() -> dict[str, Tensor]:
    """Two rows of features, one of them padded."""
    attended = torch.ones(2, 23, dtype=torch.long)
    attended[1, -6:] = 0
    return {"input_features": drawn(2, 23, 10), "attention_mask": attended}


def whole_features() -> dict[str, Tensor]:
    return without(features(), "attention_mask")


def padded_features() -> dict[str, Tensor]:
    """Two rows of features, padded on either side."""
    return features() | {"attention_mask": texts()["attention_mask"]}


def states() -> dict[str, Tensor]:
    """Two rows of features, padded on either side, and two rows to be generated."""
    generator = torch.Generator().manual_seed(1)
    attended = texts()["attention_mask"]
    values = torch.randn(*attended.shape, 24, generator=generator)
    decoded = torch.randn(2, 9, 24, generator=generator)
    return {"input_values": values, "attention_mask": attended, "decoder_input_values": decoded}


def whole_states() -> dict[str, Tensor]:
    return without(states(), "attention_mask")


def written(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the texts to be generated."""
    return inputs | {"decoder_input_ids": texts(9)["input_ids"]}


def told() -> dict[str, Tensor]:
    return written(features())


def heard() -> dict[str, Tensor]:
    return written(sounds())


def reading() -> dict[str, Tensor]:
    return texts() | {"decoder_input_values": drawn(2, 8, 5, seed=2)}


CHUNKS = {"speech_encoder_chunk_size": 8, "speech_encoder_left_chunk_num": 1}
FAR = {"left_max_position_embeddings": 64, "right_max_position_embeddings": 8}
ADAPTER = {"add_adapter": True, "use_intermediate_ffn_before_adapter": True}
BEYOND = {"encoder_max_relative_position": 160}
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
MANY = {"num_buckets": 320, "max_bucket_distance": 800}

seamless = partial(of, SeamlessM4TSpeechEncoder, SEAMLESS)
seamless_v2 = partial(of, SeamlessM4Tv2SpeechEncoder, SEAMLESS_V2)
conformer = partial(of, "Wav2Vec2ConformerModel", CONFORMER)

CASES = {
    "seamless_m4t": {
        "sdpa": Case(seamless(), features, accelerated=2),
        "eager": Case(seamless(**EAGER), features, accelerated=2),
        "whole": Case(seamless(), whole_features, accelerated=2),
        "few_positions": Case(seamless(max_source_positions=7), features, accelerated=2),
        "speech_to_text": Case(of("SeamlessM4TForSpeechToText", SEAMLESS), told, accelerated=2),
    },
    "seamless_m4t_v2": {
        "model": Case(seamless_v2(), features, accelerated=3),
        "whole": Case(seamless_v2(), whole_features, accelerated=3),
        "chunks": Case(seamless_v2(**CHUNKS), features, accelerated=3),
        "long_reach": Case(seamless_v2(left_max_position_embeddings=64), features, accelerated=3),
        "speech_to_text": Case(
            of("SeamlessM4Tv2ForSpeechToText", SEAMLESS_V2), told, accelerated=3
        ),
    },
    "speecht5": {
        "model": Case(of("SpeechT5Model", SPEECH), states, accelerated=3),
        "whole": Case(of("SpeechT5Model", SPEECH), whole_states, accelerated=3),
        "long_reach": Case(of("SpeechT5Model", SPEECH, **BEYOND), states, accelerated=3),
        "speech_to_text": Case(of("SpeechT5ForSpeechToText", SPEECH), heard, accelerated=3),
        "text_to_speech": Case(of("SpeechT5ForTextToSpeech", SPEECH), reading, accelerated=3),
    },
    "wav2vec2_bert": {
        "relative_key": Case(of("Wav2Vec2BertModel", BERT), padded_features, accelerated=2),
        "whole": Case(of("Wav2Vec2BertModel", BERT), whole_features),
        "eager": Case(of("Wav2Vec2BertModel", BERT, **EAGER), padded_features),
        "long_reach": Case(of("Wav2Vec2BertModel", BERT, **FAR), padded_features),
        "relative": Case(of("Wav2Vec2BertModel", BERT, **RELATIVE), padded_features),
        "adapter": Case(of("Wav2Vec2BertModel", BERT, **ADAPTER), padded_features, accelerated=2),
    },
    "wav2vec2_conformer": {
        "sdpa": Case(conformer(), sounds, accelerated=2),
        "eager": Case(conformer(**EAGER), sounds),
        "whole": Case(conformer(), whole_sounds),
        "few_positions": Case(conformer(max_source_positions=7), sounds),
        "adapter": Case(conformer(add_adapter=True), sounds, accelerated=2),
        "ctc": Case(of("Wav2Vec2ConformerForCTC", CONFORMER), sounds),
    },
    "wavlm": {
        "model": Case(of("WavLMModel", WAVLM), sounds, accelerated=2),
        "whole": Case(of("WavLMModel", WAVLM), whole_sounds),
        "stable_layer_norm": Case(of("WavLMModel", WAVLM, **STABLE), sounds),
        "many_buckets": Case(of("WavLMModel", WAVLM, **MANY), sounds),
        "ctc": Case(of("WavLMForCTC", WAVLM), sounds),
    },
}
