"""LongT5."""

from __future__ import annotations

from transformers import LongT5Config, LongT5Model

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases.t5 import SIZES, pairs

BLOCKS = {"local_radius": 4, "global_block_size": 4}

CASES = {
    kind: Case(
        lambda kind=kind: LongT5Model(LongT5Config(**SIZES, **BLOCKS, encoder_attention_type=kind)),
        pairs,
        accelerated=4,
    )
    for kind in ("local", "transient-global")
}
