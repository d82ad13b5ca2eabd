"""SeamlessM4T v2."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, SeamlessM4Tv2Config, SeamlessM4Tv2ForSpeechToText
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import seamless_m4t
from tests.transformers.acceleration.cases.seamless_m4t import dictation, features, whole_features

SIZES: dict[str, Any] = seamless_m4t.SIZES | {
    "left_max_position_embeddings": 5,
    "right_max_position_embeddings": 3,
}


def make(**options: Any) -> PreTrainedModel:
    return SeamlessM4Tv2SpeechEncoder(SeamlessM4Tv2Config(**SIZES | options))


CASES = {
    "model": Case(make, features, accelerated=3),
    "whole": Case(make, whole_features, accelerated=3),
    "chunks": Case(
        lambda: make(speech_encoder_chunk_size=8, speech_encoder_left_chunk_num=1),
        features,
        accelerated=3,
    ),
    "long_reach": Case(lambda: make(left_max_position_embeddings=64), features, accelerated=3),
    "speech_to_text": Case(
        lambda: SeamlessM4Tv2ForSpeechToText(SeamlessM4Tv2Config(**SIZES)), dictation, accelerated=3
    ),
}
