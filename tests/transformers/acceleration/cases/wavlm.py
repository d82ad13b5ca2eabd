"""WavLM."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, WavLMConfig, WavLMForCTC, WavLMModel

from tests.transformers.acceleration.case import AUDIO, VOCABULARY, Case, sounds, whole_sounds

SIZES: dict[str, Any] = AUDIO | {
    "vocab_size": VOCABULARY,
    "num_buckets": 8,
    "max_bucket_distance": 16,
}


def make(**options: Any) -> PreTrainedModel:
    return WavLMModel(WavLMConfig(**SIZES | options))


CASES = {
    "model": Case(make, sounds, accelerated=2),
    "whole": Case(make, whole_sounds),
    "stable_layer_norm": Case(
        lambda: make(do_stable_layer_norm=True, feat_extract_norm="layer"), sounds
    ),
    "many_buckets": Case(lambda: make(num_buckets=320, max_bucket_distance=800), sounds),
    "ctc": Case(lambda: WavLMForCTC(WavLMConfig(**SIZES)), sounds),
}
