"""MT5."""

from __future__ import annotations

from transformers import MT5Config, MT5Model

from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases.t5 import SIZES, pairs

CASES = {"model": Case(lambda: MT5Model(MT5Config(**SIZES)), pairs, accelerated=6)}
