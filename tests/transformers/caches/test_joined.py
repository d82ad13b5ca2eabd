"""Joined caches: those of a model of one layer that reads the texts as one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.transformers import joined
from tests.transformers.caches.cases import (
    MODELS,
    TRAINED,
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

LENGTHS = (9, 4, 12)
"""Tokens of the texts; windows are of 7."""

WHOLE = texts()[:, : sum(LENGTHS)]
AFTER = texts()[:, sum(LENGTHS) : sum(LENGTHS) + 6]

ONE: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in ("grouped heads", "interleaved part", "latent", "a table of sines", "linear biases")
}
ONE |= {
    "a window": ("windows and sinks", {"layer_types": ["sliding_attention"]}),
    "no window": ("windows and sinks", {"layer_types": ["full_attention"]}),
}
"""Models of ``MODELS``, with one layer."""


def caches_of(model: Any, kind: str = "dynamic") -> list[Any]:
    """Of each text alone."""
    return [filled(model, ids, 0, empty(model, kind)) for ids in WHOLE.split(LENGTHS, 1)]


def continued(model: Any, cache: Any) -> list[Tensor]:
    """Outputs of tokens behind a cache, a few at a time and singly."""
    outputs, at = [], sum(LENGTHS)
    for ids in AFTER.split((3, 1, 1, 1), 1):
        start = at if "bloom" not in model.config.model_type else None
        outputs.append(first(read(model, ids, start, cache)))
        at += ids.shape[1]
    return outputs


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_one_layer_reads_as_if_at_once(name: str, kind: str) -> None:
    source, sizes = ONE[name]
    count = {"gptj": "n_layer", "bloom": "n_layer"}.get(MODELS[source][0], "num_hidden_layers")
    model = model_named(source, **sizes | {count: 1})
    caches = caches_of(model, kind)
    before = deepcopy(caches)
    cache = joined(model, caches)
    expected = filled(model, WHOLE, 0, empty(model, kind))
    assert type(cache) is type(expected)
    assert [type(x) for x in cache.layers] == [type(x) for x in expected.layers]
    assert int(cache.get_seq_length()) == sum(LENGTHS)
    assert error(held(cache), held(expected)) < 1e-10
    for one, other in zip(continued(model, cache), continued(model, expected), strict=True):
        assert (one - other).abs().max() < 1e-10 * other.abs().max()
    for one, other in zip(caches, before, strict=True):
        assert error(held(one), held(other)) == 0


@pytest.mark.parametrize("name", ["grouped heads", "bases by layer", "latent", "complex"])
def test_the_first_layer_is_right_and_deeper_ones_are_not(name: str) -> None:
    model = model_named(name)
    pairs = list(
        zip(held(joined(model, caches_of(model))), held(filled(model, WHOLE)), strict=True)
    )
    assert error(*([side] for side in pairs[0])) < 1e-10
    assert error(*([side] for side in pairs[1])) > 1e-3


def test_a_text_is_that_which_moved_gives() -> None:
    model = scaled("yarn")
    caches = caches_of(model)
    cache = joined(model, caches)
    begin = LENGTHS[0]
    alone = filled(model, WHOLE[:, begin : begin + LENGTHS[1]], begin)
    part = [[x[:, :, begin : begin + LENGTHS[1]] for x in layer] for layer in held(cache)]
    assert error(part, held(alone)) < 1e-10


def test_one_cache_and_empty_ones() -> None:
    model = model_named("windows and sinks")
    (cache, *_) = caches_of(model)
    nothing = empty(model, "dynamic")
    assert error(held(joined(model, [cache])), held(cache)) == 0
    both = joined(model, [nothing, cache, nothing, cache])
    assert both.get_seq_length() == 2 * LENGTHS[0]
    assert joined(model, [nothing]).get_seq_length() == 0


def _caches(model: Any, *options: dict[str, Any]) -> Any:
    made = []
    for each in options:
        ids = texts()[: each.get("rows", 2), : each.get("length", 5)]
        cache = filled(
            model, ids, 0, empty(model, each.get("kind", "dynamic"), each.get("room", 9))
        )
        if "dtype" in each:
            cache.layers[1].keys = cache.layers[1].keys.to(each["dtype"])
        made.append(cache)
    return joined(model, made)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no caches": (lambda: joined(model_of("llama"), []), "caches"),
    "a cache alone": (lambda: joined(model_of("llama"), 3), "caches"),  # type: ignore[arg-type]
    "no cache": (lambda: joined(model_of("llama"), [None]), "cache"),  # type: ignore[list-item]
    "other rows": (lambda: _caches(model_of("llama"), {"rows": 1}, {}), "caches"),
    "other kinds": (lambda: _caches(model_of("llama"), {"kind": "static"}, {}), "caches"),
    "other dtypes": (lambda: _caches(model_of("llama"), {"dtype": torch.half}, {}), "caches"),
    "no room": (
        lambda: _caches(model_of("llama"), {"kind": "static"}, {"kind": "static"}),
        "caches",
    ),
    "recurrent states": (lambda: _caches(model_of("qwen3_next"), {}, {}), "caches"),
    "recurrent states alone": (lambda: _caches(model_of("falcon_mamba"), {}, {}), "caches"),
    "learned positions": (lambda: _caches(model_of("gpt2"), {}, {}), "model"),
    "beyond dynamic": (
        lambda: _caches(scaled("dynamic"), {"length": 40}, {"length": TRAINED - 39}),
        "cache",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    call, argument = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument
    assert len(str(caught.value)) < 400
