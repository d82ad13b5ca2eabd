"""T5's copies beyond the laws: generation with caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LongT5Config,
    LongT5ForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from posenc.transformers.acceleration.interface import PositionBias
from tests.transformers.acceleration.case import texts
from tests.transformers.acceleration.cases import longt5, switch_transformers
from tests.transformers.acceleration.cases.t5 import SIZES
from tests.transformers.acceleration.test_laws import accelerated, put_under

MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "t5": (T5ForConditionalGeneration, T5Config(**SIZES)),
    "mt5": (MT5ForConditionalGeneration, MT5Config(**SIZES)),
    "umt5": (UMT5ForConditionalGeneration, UMT5Config(**SIZES)),
    "longt5": (LongT5ForConditionalGeneration, LongT5Config(**SIZES, **longt5.BLOCKS)),
    "switch": (
        SwitchTransformersForConditionalGeneration,
        SwitchTransformersConfig(**SIZES, **switch_transformers.EXPERTS),
    ),
}


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, cache: str | None) -> None:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"decoder_start_token_id": 0, "return_dict_in_generate": True}
    options |= {"output_logits": True}
    expected = model.generate(**texts(), **options)
    put_under(model)
    got = model.generate(**texts(), **options)
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_cross_attention_gets_no_bias_of_zeros(name: str) -> None:
    kind, config = MODELS[name]
    model = kind(config)
    put_under(model, check=False)
    without = [
        module
        for module in accelerated(model)
        if not module.__dict__["has_relative_attention_bias"]
    ]
    assert without
    for module in without:
        bias = module.compute_bias(4, 4)
        assert isinstance(bias, PositionBias)
        assert bias.terms == ()
        assert bias.dense is None
