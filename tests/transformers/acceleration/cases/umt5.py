"""UMT5."""

from __future__ import annotations

from transformers import UMT5Config, UMT5Model

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases.t5 import SIZES, pairs

CASES = {
    "eager": Case(
        lambda: UMT5Model(UMT5Config(**SIZES, attn_implementation="eager")), pairs, accelerated=6
    ),
    "sdpa": Case(lambda: UMT5Model(UMT5Config(**SIZES, attn_implementation="sdpa")), pairs),
}
