"""Switch Transformers."""

from __future__ import annotations

from transformers import SwitchTransformersConfig, SwitchTransformersModel

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases.t5 import SIZES, pairs

EXPERTS = {
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_experts": 2,
    "router_jitter_noise": 0.0,
}

CASES = {
    "model": Case(
        lambda: SwitchTransformersModel(SwitchTransformersConfig(**SIZES, **EXPERTS)),
        pairs,
        accelerated=6,
    )
}
