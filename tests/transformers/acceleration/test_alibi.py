"""Models with ALiBi beyond the laws: generation with caches, and models left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)

from tests.transformers.acceleration.case import texts
from tests.transformers.acceleration.cases import bloom, falcon, mpt
from tests.transformers.acceleration.test_laws import accelerated, put_under

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(**bloom.SIZES)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**falcon.SIZES)),
    "mpt": lambda: MptForCausalLM(MptConfig(**mpt.SIZES)),
}


@pytest.mark.parametrize(
    ("name", "cache"),
    [  # Falcon's own masks with ALiBi do not fit static caches.
        *(("bloom", cache) for cache in ("dynamic", "static", None)),
        *(("falcon", cache) for cache in ("dynamic", None)),
        *(("mpt", cache) for cache in ("dynamic", "static", None)),
    ],
)
def test_generation(name: str, cache: str | None) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    inputs = texts()
    inputs["attention_mask"][1] = 1
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 3}
    expected = model.generate(**inputs, **options)
    put_under(model)
    got = model.generate(**inputs, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_padding_between_tokens(name: str) -> None:
    model = MODELS[name]().eval()
    inputs = texts()
    inputs["attention_mask"][:, 8:11] = 0
    seen = inputs["attention_mask"].cumsum(1) > 0
    expected = model(**inputs).logits[seen]
    put_under(model)
    torch.testing.assert_close(model(**inputs).logits[seen], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_attention_weights(name: str) -> None:
    model = MODELS[name]().eval()
    if name == "falcon":
        model.set_attn_implementation("eager")
    expected = model(**texts(), output_attentions=True)
    put_under(model)
    got = model(**texts(), output_attentions=True)
    for a, b in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: falcon.make(alibi=False), "rotary"),
        (lambda: bloom.make(pretraining_tp=2, slow_but_exact=True), "slow_but_exact"),
    ],
)
def test_refused_models_stay(model: Callable[[], PreTrainedModel], reason: str) -> None:
    made = model().eval()
    configs = [module.__dict__.get("config") for module in made.modules()]
    report = put_under(made, check=False)
    assert report.accelerated == len(accelerated(made)) == 0
    assert all(reason in module.reason for module in report.modules)
    assert all(
        module.__dict__.get("config") is config
        for module, config in zip(made.modules(), configs, strict=True)
    )
