"""DeBERTa-v2 and v3."""

from __future__ import annotations

from typing import Any

from transformers import DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2Model, PreTrainedModel

from tests.transformers.acceleration.case import Case, texts, whole_texts
from tests.transformers.acceleration.cases.deberta import SIZES as V1

SIZES: dict[str, Any] = V1 | {
    "position_buckets": 8,
    "max_relative_positions": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}


def make(**options: Any) -> PreTrainedModel:
    return DebertaV2Model(DebertaV2Config(**SIZES | options))


CASES = {
    "v3": Case(make, accelerated=3),
    "whole": Case(make, whole_texts),
    "masked_lm": Case(lambda: DebertaV2ForMaskedLM(DebertaV2Config(**SIZES))),
    "own_projections": Case(lambda: make(share_att_key=False)),
    "c2p": Case(lambda: make(pos_att_type=["c2p"], share_att_key=False)),
    "p2c": Case(lambda: make(pos_att_type=["p2c"])),
    "no_buckets": Case(lambda: make(position_buckets=-1)),
    "without_relative_attention": Case(
        lambda: make(relative_attention=False, position_biased_input=True)
    ),
    "long": Case(lambda: make(num_hidden_layers=1), lambda: texts(600)),
    "convolution": Case(lambda: make(conv_kernel_size=3)),
}
