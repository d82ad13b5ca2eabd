"""Inkling beyond the laws: caches, calls without a mask, and what is computed on a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    InklingForCausalLM,
    InklingTextConfig,
    PreTrainedModel,
    StaticCache,
)

from posenc.attention import api
from posenc.grid import FARTHEST
from posenc.transformers.acceleration import interface
from tests.support.caches import given
from tests.transformers.acceleration.case import texts, whole_texts
from tests.transformers.acceleration.cases.inkling import CASES, SIZES
from tests.transformers.acceleration.test_laws import put_under

pytestmark = pytest.mark.filterwarnings("ignore:.*causal_conv1d")


def lm(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return InklingForCausalLM(InklingTextConfig(**SIZES | options)).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", None])
def test_generation(cache: str | None, implementation: str) -> None:
    """Static caches fail in transformers' own Inkling here, which masks windows as full layers."""
    model, inputs = lm(attn_implementation=implementation), texts()
    inputs["attention_mask"][1] = 1
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    put_under(model)
    got = model.generate(**inputs, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_chunks_of_tokens_after_a_cache(static: bool) -> None:
    """Chunks past the window and the extent, each of several tokens, then one."""
    model, ids = lm(), whole_texts()["input_ids"]
    expected = model(ids).logits
    put_under(model)
    cache: Any = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=30)
    parts = []
    for begin, end in ((0, 5), (5, 20), (20, 22), (22, 23)):
        parts.append(model(ids[:, begin:end], **given(model, cache)).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cached", [False, True])
def test_a_layer_without_a_mask_is_causal(cached: bool) -> None:
    """As PyTorch's kernel takes it, where the model leaves the mask out."""
    model = lm()
    layer, x = model.model.layers[0].self_attn, torch.randn(2, 6, 24)
    caches = [DynamicCache(config=model.config) for _ in range(2)] if cached else [None, None]
    for cache in caches:
        if cache is not None:
            layer(torch.ones(2, 1, 24), None, **given(layer, cache))

    def outputs(cache: Any) -> Tensor:
        if cache is None:
            output: Tensor = layer(x, None)[0]
            return output
        held = given(layer, cache)
        return torch.cat([layer(x[:, i : i + 1], None, **held)[0] for i in range(6)])

    expected = outputs(caches[0])
    put_under(model)
    torch.testing.assert_close(outputs(caches[1]), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", ["padded", "multimodal"])
def test_both_kinds_of_layers_are_computed_on_grids(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from a bias and a mask of all pairs, whichever model makes the masks."""
    model, inputs = CASES[case].model(), texts()
    put_under(model)
    bands: list[tuple[int, int]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, grid: Any, *rest: Any, **options: Any) -> Any:
        bands.append(grid.band)
        return api.attend(q, k, v, grid, *rest, **options)

    monkeypatch.setattr(interface, "attend", attend)
    monkeypatch.setattr(interface, "dense_attention", None)
    model(**inputs)
    assert bands == [(-FARTHEST, 0), (1 - SIZES["sliding_window_size"], 0)]
