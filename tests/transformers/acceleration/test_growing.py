"""Cache layers with room to grow: equal to transformers' in every operation."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from posenc.transformers.acceleration import accelerate, growing, restore
from posenc.transformers.acceleration.growing import LEAST, Buffers, Growing, grow, settle
from tests.support.caches import cache_of, given
from tests.testing.tiny_models import tiny_config

SEEDS = count()
MAKERS: dict[str, Callable[[], DynamicLayer]] = {
    "whole": DynamicLayer,
    "window": lambda: DynamicSlidingWindowLayer(7),
}


@pytest.fixture(autouse=True)
def _short_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches grow whatever their length."""
    monkeypatch.setattr(growing, "COPIED", -1)


def tokens(number: int, batch: int = 2, **options: Any) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(next(SEEDS))
    keys = torch.randn(batch, 3, number, 4, generator=made).to(**options)
    return keys, torch.randn(batch, 3, number, 5, generator=made).to(**options)


def grown(layer: Any, *new: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer's ``update`` answers in a pass of an accelerated model."""
    cache = DynamicCache()
    cache.layers = [layer]
    given: Any = (torch.nn.Module(), (), {"cache": cache})
    grow(*given)
    assert isinstance(layer, Growing)
    found: tuple[Tensor, Tensor] = layer.update(*new)
    settle(*given, None)
    assert not isinstance(layer, Growing)
    return found


class Twin:
    """A layer of transformers and a growing one, which the same is done to."""

    def __init__(self, kind: str) -> None:
        self.plain, self.growing = MAKERS[kind](), MAKERS[kind]()

    def update(self, number: int, batch: int = 2, **options: Any) -> tuple[Tensor, Tensor]:
        new = tokens(number, batch, **options)
        expected, found = self.plain.update(*new), grown(self.growing, *new)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
        self.check()
        return found

    def updates(self, *numbers: int) -> None:
        for number in numbers:
            self.update(number)

    def do(self, name: str, *arguments: Any) -> None:
        getattr(self.plain, name)(*arguments)
        getattr(self.growing, name)(*arguments)
        self.check()

    def check(self) -> None:
        for name in ("get_seq_length", "get_max_length"):
            assert getattr(self.plain, name)() == getattr(self.growing, name)()
        assert self.plain.get_mask_sizes(2) == self.growing.get_mask_sizes(2)
        for name in ("keys", "values"):
            expected, held = (getattr(layer, name) for layer in (self.plain, self.growing))
            assert (expected is None) == (held is None)
            assert expected is None or torch.equal(expected, held)


@pytest.fixture(params=MAKERS)
def twin(request: pytest.FixtureRequest) -> Iterator[Twin]:
    with torch.no_grad():
        yield Twin(request.param)


def test_updates_beyond_the_buffer(twin: Twin) -> None:
    twin.update(5)
    for _ in range(2 * LEAST):
        twin.update(1)
    for number in (3, LEAST - 1, 9, 2 * LEAST + 1, 1):
        twin.update(number)


def test_a_step_copies_no_token(twin: Twin) -> None:
    twin.update(5)
    first = twin.update(1)
    second = twin.update(1)
    for one, other in zip(first, second, strict=True):
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_what_was_handed_out_stays(twin: Twin) -> None:
    """As it does with transformers' layers: also after tokens were taken back."""
    given = [twin.update(2), twin.update(1), twin.update(1)]
    kept = [x.clone() for pair in given for x in pair]
    held = twin.growing.keys, twin.growing.keys.clone()
    twin.do("crop", -2)
    twin.updates(1, 1)
    assert all(torch.equal(x, y) for x, y in zip([*sum(given, ())], kept, strict=True))
    assert torch.equal(*held)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("reorder_cache", (torch.tensor([1, 0]),)),
        ("reorder_cache", (torch.tensor([1, 1]),)),
        ("crop", (-1,)),
        ("reset", ()),
        ("offload", ()),
        ("prefetch", ()),
    ],
)
def test_operations_between_steps(twin: Twin, name: str, arguments: tuple[Any, ...]) -> None:
    twin.updates(3, 1, 1)
    twin.do(name, *arguments)
    twin.updates(1, 1, 2)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_keys_or_values_that_are_replaced(twin: Twin, name: str) -> None:
    twin.updates(3, 1, 1)
    for layer in (twin.plain, twin.growing):
        setattr(layer, name, 2 * getattr(layer, name))
    twin.updates(1, 1)
    for layer in (twin.plain, twin.growing):
        getattr(layer, name).data = torch.zeros_like(getattr(layer, name))
    twin.updates(1, 1)


def test_other_batches(twin: Twin) -> None:
    twin.updates(3, 1, 1)
    twin.do("batch_repeat_interleave", 2)
    twin.update(1, batch=4)
    twin.update(1, batch=4)
    twin.do("batch_select_indices", torch.tensor([0, 3]))
    twin.updates(1, 1)


@torch.no_grad()
def test_a_rollback_of_a_window() -> None:
    twin = Twin("window")
    twin.updates(9, 1, 1)
    twin.do("activate_past_recording")
    twin.updates(4, 1)
    twin.do("crop", -3)
    twin.growing.record_past = twin.plain.record_past = False
    twin.updates(1, 1, 5)


def test_tokens_of_another_dtype(twin: Twin) -> None:
    for options in ({}, {}, {"dtype": torch.float64}, {"dtype": torch.float64}):
        twin.update(1, **options)


def test_gradients_reach_earlier_tokens() -> None:
    for kind in MAKERS:
        twin, sums = Twin(kind), []
        new = [tokens(number) for number in (2, 1, 1)]
        for update in (twin.plain.update, partial(grown, twin.growing)):
            leaves = [[x.clone().requires_grad_() for x in pair] for pair in new]
            total = torch.zeros(())
            for pair in leaves:
                total = total + sum(x.square().sum() for x in update(*pair))
            total.backward()
            sums.append([x.grad for pair in leaves for x in pair])
        assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))


def test_a_pass_with_gradients_may_follow_by_one_without(twin: Twin) -> None:
    """Writing into what the first saved for its backward pass would be an error."""
    twin.update(3)
    twin.update(1)
    query = torch.ones(2, 3, 1, 4, requires_grad=True)
    with torch.enable_grad():
        keys, _ = twin.update(1)
        total = (query @ keys.mT).sum()
    twin.updates(1, 1)
    total.backward()
    assert torch.equal(query.grad, keys.sum(2, keepdim=True))


def test_inference_mode_may_end_between_steps(twin: Twin) -> None:
    with torch.inference_mode():
        twin.update(3)
        twin.updates(1, 1)
    twin.updates(1, 1)
    with torch.inference_mode():
        twin.update(1)


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_update_as_transformers_does(twin: Twin, copied: Callable[[Any], Any]) -> None:
    twin.updates(9, 1, 1)
    found = copied(twin.growing)
    assert type(found) is type(twin.plain)
    twin.update(1)  # which the copy does not see
    new = tokens(1)
    assert torch.equal(grown(copied(twin.growing), *new)[0], twin.plain.update(*new)[0])
    assert found.get_seq_length() == 11


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "bart"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_models_generate_the_same(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    asked = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True} | options
    inputs = torch.randint(3, 60, (1, 9))
    expected = model.generate(inputs, **asked)
    accelerate(model, check=False)
    found = model.generate(inputs, **asked)
    assert torch.equal(expected.sequences, found.sequences)
    cache = cache_of(found)
    layers = getattr(cache, "self_attention_cache", cache).layers
    assert any(isinstance(getattr(x, "_posenc_buffers", None), Buffers) for x in layers)
    assert not any(isinstance(layer, Growing) for layer in layers)
    restore(model)
    again = cache_of(model.generate(inputs, **asked))
    layers = getattr(again, "self_attention_cache", again).layers
    assert not any(hasattr(layer, "_posenc_buffers") for layer in layers)


def test_layers_of_other_classes_keep_their_update() -> None:
    class Own(DynamicLayer):
        """A layer that may keep its keys otherwise, as quantized ones do."""

    cache = DynamicCache()
    cache.layers = [Own(), DynamicLayer()]
    grow(torch.nn.Module(), (cache,), {})
    assert [type(layer) for layer in cache.layers] == [Own, Growing]


@pytest.mark.parametrize("name", ["cache", "past_key_values", None])
def test_caches_are_found_whatever_they_are_called(name: str | None) -> None:
    caches = DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())
    for cache in caches:
        layers = getattr(cache, "self_attention_cache", cache).layers
        layers.append(DynamicLayer())
        inputs, options = ((1, cache), {}) if name is None else ((1,), {name: cache})
        grow(torch.nn.Module(), inputs, options)
        assert isinstance(layers[0], Growing)


def test_a_copy_of_a_model_is_restored_too() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    accelerate(model, check=False)
    copy = deepcopy(model)
    restore(copy)
    for part in copy.modules():
        assert not part._forward_pre_hooks
        assert not part._forward_pre_hooks_with_kwargs
        assert not part._forward_hooks
        assert not part._forward_hooks_with_kwargs
        assert not part._forward_hooks_always_called
    assert model._forward_pre_hooks
    assert model._forward_hooks


def test_layers_are_of_their_own_class_after_a_pass_that_raises() -> None:
    model, cache = AutoModelForCausalLM.from_config(tiny_config("llama")).eval(), DynamicCache()
    accelerate(model, check=False)
    ids = torch.randint(3, 60, (1, 9))
    with torch.no_grad():
        model(ids, **given(model, cache))
        with pytest.raises(IndexError):
            model(ids + 10**6, **given(model, cache))
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}


@torch.no_grad()
def test_short_caches_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until copying keys takes longer than what saves it: 3 heads of 4 float32 features, 48 B."""
    monkeypatch.setattr(growing, "COPIED", 2 * 48 * 9)
    twin = Twin("whole")
    twin.updates(8, 1)
    assert twin.growing._posenc_buffers is None
    twin.updates(1)
    assert twin.growing._posenc_buffers is None
    twin.updates(1, 1)
    assert twin.growing._posenc_buffers is not None
