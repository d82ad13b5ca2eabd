"""Moved caches: those that a model fills at other positions, in all layers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from posenc.attention.backends.native import rotation
from posenc.errors import ArgumentError
from posenc.transformers import accelerate, moved, stretch
from tests.support.caches import cache_of
from tests.transformers.caches.cases import (
    MODELS,
    SCALED,
    TRAINED,
    double_precision,
    empty,
    error,
    filled,
    held,
    model_named,
    read,
    scaled,
)
from tests.transformers.stretching.cases import model_of, texts
from tests.transformers.stretching.sweep import first

LENGTH, BY = 20, 23
IDS = texts()[:, :LENGTH]
NEXT = texts()[:, LENGTH : LENGTH + 2]


@pytest.fixture(autouse=True)
def _by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches are moved by the compiled kernel too, past the processor's caches."""
    monkeypatch.setattr(rotation, "FEW", 0)
    monkeypatch.setattr(rotation, "STREAMED", 0)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("by", [BY, 1, 0])
def test_every_scaling(kind: str, by: int) -> None:
    model = scaled(kind)
    expected = filled(model, IDS, by)
    cache = moved(model, filled(model, IDS), by=by)
    assert error(held(cache), held(expected)) < 1e-10
    one, other = (first(read(model, NEXT, LENGTH + by, x)) for x in (cache, expected))
    assert (one - other).abs().max() < 1e-10 * other.abs().max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "in_place"), [("dynamic", False), ("static", True)])
def test_every_layer_of(name: str, kind: str, in_place: bool) -> None:
    model = model_named(name)
    cache = filled(model, IDS, 0, empty(model, kind))
    before = deepcopy(cache)
    new = moved(model, cache, by=BY, in_place=in_place)
    expected = filled(model, IDS, BY, empty(model, kind))
    assert error(held(new), held(expected)) < 1e-10
    assert error(held(cache), held(new if in_place else before)) == 0
    if name != "linear biases":  # which keys do not hold
        assert error(held(new), held(before)) > 1e-3
    options = {} if name == "linear biases" else {"start": LENGTH + BY}
    logits = [
        first(read(model, NEXT, cache=x, **{"start": None} | options)) for x in (new, expected)
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-10 * logits[1].abs().max()


@pytest.mark.parametrize("name", ["grouped heads", "windows and sinks", "latent"])
def test_there_and_back(name: str) -> None:
    model = model_named(name)
    cache = filled(model, IDS)
    far = moved(model, cache, by=10**6)
    assert error(held(moved(model, far, by=-(10**6))), held(cache)) < 1e-9


def test_pairs_that_are_turned_the_other_way() -> None:
    model = scaled("default")
    rotary = model.model.rotary_emb
    rotary.register_forward_hook(lambda module, inputs, output: (output[0], -output[1]))
    expected = filled(model, IDS, BY)
    assert error(held(moved(model, filled(model, IDS), by=BY)), held(expected)) < 1e-10


def test_longrope_of_long_texts() -> None:
    model = scaled("longrope")
    ids = texts(TRAINED + 8)
    expected = filled(model, ids, BY)
    cache = filled(model, ids)
    read(model, IDS)  # which switches the frequencies back
    assert error(held(moved(model, cache, by=BY)), held(expected)) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["grouped heads", "interleaved", "latent"])
def test_keys_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    model = model_named(name)
    cache = filled(model, IDS)
    for layer in cache.layers:
        layer.keys, layer.values = (8 * x.to(dtype) for x in (layer.keys, layer.values))
    wide = deepcopy(cache)
    for layer in wide.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    exact, rounded = (held(moved(model, x, by=9001)) for x in (wide, cache))
    unit, single = torch.finfo(dtype).eps / 2, 8 * torch.finfo(torch.float32).eps
    for one, other in zip(chain(*exact), chain(*rounded), strict=True):
        assert other.dtype == dtype
        allowed = 1.001 * unit * one.abs() + single * one.abs().max()
        assert bool(((one - other.double()).abs() <= allowed).all())


def test_models_in_half_precision_and_on_the_way() -> None:
    """Frequencies are those of the buffer, which a cast model rotates by."""
    model = model_of("llama").bfloat16().eval()
    cache = filled(model, IDS)
    theta = model.model.rotary_emb.inv_freq
    assert theta.dtype == torch.bfloat16
    new = moved(model, cache, by=500)
    angles = 500 * theta.double()
    first, second = cache.layers[0].keys.double().chunk(2, -1)
    turned = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        -1,
    )
    assert (new.layers[0].keys - turned).abs().max() < 0.01 * turned.abs().max()


def test_a_static_cache_keeps_its_memory() -> None:
    model = model_named("windows and sinks")
    cache = filled(model, IDS, 0, empty(model, "static"))
    address = [x.keys.data_ptr() for x in cache.layers]
    assert moved(model, cache, by=BY, in_place=True) is cache
    assert [x.keys.data_ptr() for x in cache.layers] == address
    copied = moved(model, cache, by=BY)
    read(model, NEXT, LENGTH + 2 * BY, copied)
    assert int(cache.get_seq_length()) == LENGTH
    expected = filled(model, IDS, 0, empty(model, "static"))
    assert error(held(moved(model, cache, by=-BY)), held(expected)) < 1e-10


def test_a_copy_is_not_written_into() -> None:
    model = model_named("windows and sinks")
    cache = filled(model, IDS)
    before = deepcopy(cache)
    copied = moved(model, cache, by=BY)
    read(model, NEXT, LENGTH + BY, copied)
    assert error(held(cache), held(before)) == 0
    assert cache.get_seq_length() == LENGTH


def test_rotations_are_read_once_and_again_when_they_change() -> None:
    model, passes = scaled("default"), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    cache = filled(model, IDS)
    passes.clear()
    moved(model, cache, by=BY)
    count = len(passes)
    moved(model, cache, by=2)
    assert count == len(passes) == 2
    stretch(model, "yarn", factor=4)
    with double_precision():
        expected = filled(model, IDS, BY)
    stretched = moved(model, filled(model, IDS), by=BY)
    assert error(held(stretched), held(expected)) < 1e-6  # stretched frequencies are rounded
    assert error(held(stretched), held(moved(model, cache, by=BY))) > 1e-3
    model.model.rotary_emb = deepcopy(model.model.rotary_emb)
    model.model.rotary_emb.inv_freq *= 2
    expected = filled(model, IDS, BY)
    assert error(held(moved(model, filled(model, IDS), by=BY)), held(expected)) < 1e-6


def test_keys_without_gradients_of_a_pass_with_them() -> None:
    model = model_of("llama")
    cache = cache_of(model(IDS, use_cache=True))
    assert cache.layers[0].keys.requires_grad
    assert not moved(model, cache, by=BY).layers[1].keys.requires_grad


def test_accelerated_models() -> None:
    model = model_of("llama").eval()
    expected = held(filled(model, IDS, BY))
    accelerate(model, check=False)
    cache = moved(model, filled(model, IDS), by=BY)
    assert error(held(cache), expected) < 1e-4


@torch.no_grad()
def test_t5_needs_nothing() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=128, **sizes)).eval()
    output = model(IDS, decoder_input_ids=IDS, use_cache=True)
    cache = cache_of(output).self_attention_cache
    assert error(held(moved(model, cache, by=BY)), held(cache)) == 0


def _quantized(cache: Any) -> Any:
    class Other(DynamicLayer):
        pass

    cache.layers[0].__class__ = Other
    return cache


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: moved(torch.nn.Linear(1, 1), DynamicCache(), by=1), "model"),
    "no cache": (lambda: moved(_llama(), (), by=1), "cache"),  # type: ignore[arg-type]
    "a fraction": (lambda: moved(_llama(), DynamicCache(), by=0.5), "by"),  # type: ignore[arg-type]
    "no word for a copy": (
        lambda: moved(_llama(), DynamicCache(), by=1, in_place="no"),  # type: ignore[arg-type]
        "in_place",
    ),
    "another layer": (lambda: moved(_llama(), _quantized(filled(_llama(), IDS)), by=1), "cache"),
    "another model's": (
        lambda: moved(_llama(), filled(model_of("llama", num_key_value_heads=4), IDS), by=1),
        "cache",
    ),
    "learned positions": (lambda: moved(*_with_cache(model_of("gpt2")), by=1), "model"),
    "positions of a decoder": (lambda: moved(*_with_cache(model_of("opt")), by=1), "model"),
    "a norm behind": (lambda: moved(*_with_cache(model_of("hunyuan_v1_dense")), by=1), "model"),
    "beyond dynamic": (lambda: moved(*_with_cache(scaled("dynamic")), by=TRAINED), "cache"),
    "all beyond dynamic": (
        lambda: moved(scaled("dynamic"), filled(scaled("dynamic"), texts(TRAINED + 8)), by=1),
        "cache",
    ),
    "over a switch": (lambda: moved(*_with_cache(scaled("longrope")), by=TRAINED), "cache"),
    "unrotated keys": (lambda: moved(*_with_cache(_stretched()), by=1), "model"),
    "indexers": (lambda: moved(*_with_cache(model_of("glm_moe_dsa")), by=1), "cache"),
    "an encoder's": (lambda: moved(model_of("bert"), _filled_layer(), by=1), "model"),
}


def _llama() -> Any:
    return model_of("llama").eval()


def _stretched() -> Any:
    model = _llama()
    stretch(model, "rerope", length=64, window=16)
    return model


def _with_cache(model: Any) -> tuple[Any, Any]:
    return model, filled(model, IDS, None)


def _filled_layer() -> Any:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    return cache


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    call, argument = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument
