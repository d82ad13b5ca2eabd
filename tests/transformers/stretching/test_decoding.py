"""Decoding of stretched layers with rotated keys beside transformers' cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.executorch import register_dynamic_cache_export_support

from posenc import Encoding, Grid, Layout, attend, create
from posenc.extension import extend
from posenc.transformers import stretch
from posenc.transformers.acceleration.growing import grow, settle
from posenc.transformers.stretching import attention
from posenc.transformers.stretching.attention import RotatedKeys, rotated_keys
from tests.support.caches import cache_of, given
from tests.transformers.stretching.cases import model_of, near, placed, texts

METHODS: dict[str, dict[str, Any]] = {
    "rerope": {"window": 6},
    "self_extend": {"factor": 4},
    "leaky_rerope": {"factor": 4},
    "dual_chunk": {},
    "string": {"length": 32, "factor": 1.5},
    "log_n": {},
    "rerope+log_n": {"window": 6},
    "yarn+log_n": {"factor": 4, "alpha": 0.1, "beta": 1},
}
ROTATIONS = {"self_extend": 2, "leaky_rerope": 2}


def stretched(method: str = "self_extend", kind: str = "llama") -> Any:
    model = model_of(kind)
    stretch(model, method, **{"length": 16} | METHODS[method])
    return model


@torch.no_grad()
def step(model: Any, cache: Any, begin: int, end: int, **options: Any) -> Tensor:
    logits: Tensor = model(texts()[:, begin:end], **given(model, cache), **options).logits
    return logits


def kept(cache: DynamicCache) -> list[RotatedKeys]:
    return [keys for layer in cache.layers for keys in rotated_keys(layer)]


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_rotates_what_is_new(
    method: str, growing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the caches of an accelerated model."""
    model, cache = stretched(method), DynamicCache()
    if growing:
        monkeypatch.setattr("posenc.transformers.acceleration.growing.COPIED", -1)
        model.register_forward_pre_hook(grow, with_kwargs=True)
        model.register_forward_hook(settle, with_kwargs=True)
    expected = step(model, DynamicCache(), 0, 40)
    new: list[int] = []
    extend = RotatedKeys.extend
    monkeypatch.setattr(
        RotatedKeys, "extend", lambda self, x: new.append(x.shape[2]) or extend(self, x)
    )
    step(model, cache, 0, 25)
    assert not kept(cache)
    parts = [step(model, cache, t, t + 1) for t in range(25, 33)]
    parts.append(step(model, cache, 33, 36))
    parts += [step(model, cache, t, t + 1) for t in range(36, 40)]
    assert near(expected[:, 25:], torch.cat(parts, 1))
    count = 2 * ROTATIONS.get(method, 1)
    assert new == [26] * count + [1] * 7 * count + [4] * count + [1] * 3 * count
    assert len(kept(cache)) == count


def test_caches_have_the_layers_of_the_model() -> None:
    """Their number and classes, which transformers counts and exports by."""
    model, cache = stretched(), DynamicCache()
    step(model, cache, 0, 30)
    step(model, cache, 30, 31)
    generated = model.generate(
        texts(), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    assert kept(cache)
    for found in (cache, copy.deepcopy(cache), cache_of(generated)):
        assert [type(layer) for layer in found.layers] == [DynamicLayer] * 2


@pytest.mark.parametrize("method", ["rerope", "self_extend"])
def test_a_step_behind_a_cache_is_exported(method: str) -> None:
    """Graphs get the keys of a cache alone, so positions are counted back from the step's."""
    register_dynamic_cache_export_support()
    model = stretched(method)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, attended: Tensor, places: Tensor, cache: Any) -> Tensor:
            options = {"attention_mask": attended, "position_ids": places}
            logits: Tensor = self.model(ids, **options, **given(self.model, cache)).logits
            return logits

    attended = torch.ones_like(texts())[:, :31]
    attended[1, :5] = 0
    places = placed(attended)["position_ids"]
    caches = [DynamicCache() for _ in range(3)]
    for cache in caches:
        step(model, cache, 0, 30, **placed(attended[:, :30]))
    expected = step(model, caches[0], 30, 31, attention_mask=attended, position_ids=places[:, 30:])
    inputs = (texts()[:, 30:31], attended, places[:, 30:])
    with torch.no_grad():
        program = torch.export.export(Step(), (*inputs, caches[1])).module()
        assert near(expected, program(*inputs, caches[2]))


@pytest.mark.parametrize("method", ["rerope", "dual_chunk", "log_n"])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "glm4"])
def test_sinks_caps_and_pairings(method: str, kind: str) -> None:
    model, cache = stretched(method, kind), DynamicCache()
    expected = step(model, DynamicCache(), 0, 40)
    parts = [step(model, cache, 0, 30), *(step(model, cache, t, t + 1) for t in range(30, 40))]
    assert near(expected, torch.cat(parts, 1))
    assert kept(cache)


@pytest.mark.parametrize("method", METHODS)
def test_padding_and_holes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, attended = stretched(method), torch.ones_like(texts())
    attended[0, :9] = attended[1, 20:24] = 0
    places = placed(attended)["position_ids"]
    places[1, 30:] += 7

    def decoded() -> Tensor:
        cache = DynamicCache()
        parts = [
            step(model, cache, a, b, attention_mask=attended[:, :b], position_ids=places[:, a:b])
            for a, b in [(0, 32), (32, 33), (33, 34), (34, 35)]
        ]
        return torch.cat(parts, 1)[:, 32:]

    found = decoded()
    monkeypatch.setattr(attention, "served", lambda *_: False)
    assert near(decoded(), found)


@pytest.mark.parametrize("method", ["rerope", "log_n"])
def test_a_past_may_have_other_positions_than_a_query_at_its_index(method: str) -> None:
    model, cache, places = stretched(method), DynamicCache(), torch.arange(40).unsqueeze(0)
    places = places + 9 * ((places > 4) & (places < 20))
    parts = [
        step(model, cache, a, b, position_ids=places[:, a:b])
        for a, b in [(0, 30), (30, 36), (36, 37)]
    ]
    assert near(
        torch.cat(parts, 1), step(model, DynamicCache(), 0, 37, position_ids=places[:, :37])
    )


def cropped(model: Any, cache: DynamicCache) -> Tensor:
    cache.crop(-4)
    step(model, cache, 28, 29)
    return step(model, cache, 29, 30)


def reordered(model: Any, cache: DynamicCache) -> Tensor:
    for _ in range(2):
        cache.reorder_cache(torch.tensor([1, 0]))
        logits = step(model, cache, 32, 33)
    return logits


def repeated(model: Any, cache: DynamicCache) -> Tensor:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    return step(model, cache, 32, 33)


def copied(model: Any, cache: DynamicCache) -> Tensor:
    other = copy.deepcopy(cache)
    step(model, cache, 39, 40)
    return step(model, other, 32, 33)


def emptied(model: Any, cache: DynamicCache) -> Tensor:
    cache.reset()
    with torch.no_grad():
        model(texts()[:1, :20], **given(model, cache))
        logits: Tensor = model(texts()[:1, 20:21], **given(model, cache)).logits
    return logits


def frozen(model: Any, cache: DynamicCache) -> Tensor:
    with torch.inference_mode():
        step(model, cache, 32, 33)
    return step(model, cache, 33, 34)


def trained(model: Any, cache: DynamicCache) -> Tensor:
    before = len(kept(cache)), kept(cache)[0].get_seq_length()
    logits: Tensor = model(texts()[:, 32:33], **given(model, cache)).logits
    assert logits.requires_grad
    assert before == (len(kept(cache)), kept(cache)[0].get_seq_length())
    return torch.cat([logits, step(model, cache, 33, 34)], 1).detach()


@pytest.mark.parametrize("change", [cropped, reordered, repeated, copied, emptied, frozen, trained])
def test_rotated_keys_follow_the_cache(
    change: Callable[[Any, DynamicCache], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stretched()

    def changed() -> Tensor:
        cache = DynamicCache()
        step(model, cache, 0, 30)
        for t in (30, 31):
            step(model, cache, t, t + 1)
        return change(model, cache)

    found = changed()
    if change is not trained:
        monkeypatch.setattr(attention, "served", lambda *_: False)
    else:
        monkeypatch.setattr(attention.RotatedKeys, "get_seq_length", lambda self: 0)
    assert near(changed(), found)


@torch.no_grad()
@pytest.mark.parametrize("method", ["rerope", "self_extend"])
def test_layers_of_one_pass_may_have_kept_other_numbers_of_keys(method: str) -> None:
    encoding = extend(create("rope", head_dim=8), method, **{"length": 16} | METHODS[method])
    whole, (q, k, v) = Layout.sequence(30), torch.randn(3, 1, 2, 30, 8)
    pasts = DynamicLayer(), DynamicLayer()

    def last(length: int, past: DynamicLayer) -> Tensor | None:
        given = q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length]
        return attention.attend_last(*given, grids[length], encoding, past, scale=0.3)

    grids = {n: Grid(whole.slice(n - 1, n), whole.slice(0, n), causal=True) for n in (29, 30)}
    last(29, pasts[0])
    expected = attend(q[:, :, 29:], k, v, grids[30], encoding, scale=0.3)
    for past in pasts:
        torch.testing.assert_close(last(30, past), expected)


def test_rotations_that_change_with_the_length_are_not_kept() -> None:
    model, cache = model_of("llama", num_hidden_layers=1), DynamicCache()
    stretch(model, "dynamic_ntk", factor=4, length=16)
    step(model, cache, 0, 38)
    step(model, cache, 38, 39)
    assert near(step(model, DynamicCache(), 0, 40)[:, 39:], step(model, cache, 39, 40))
    assert not kept(cache)


def test_what_is_served() -> None:
    rope = create("rope", head_dim=8)
    layouts = Layout.sequence(1, start=9), Layout.sequence(10)
    causal, open_ended = Grid(*layouts, causal=True), Grid(*layouts)
    both = extend(rope, "rerope+log_n", length=4)
    assert attention.served(both, causal)
    assert attention.served(extend(rope, "rerope", length=4), open_ended)
    # its factor counts all keys that a query sees where attention is not causal
    assert not attention.served(both, open_ended)
    # keys that nothing rotates need no copy, and those of trained frequencies would be stale
    assert not attention.served(extend(Encoding(), "log_n", length=4), causal)
    assert not attention.served(create("rope", head_dim=8, learned=True), causal)


def test_half_precision_is_left_to_attend() -> None:
    model, cache = stretched("rerope").bfloat16(), DynamicCache()
    step(model, cache, 0, 30)
    step(model, cache, 30, 31)
    assert not kept(cache)


# Caches of a fixed size, whose decoding is compiled once for all lengths

MOST = 48


def fixed(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=MOST)


def graphs_of_generation(model: Any) -> int:
    """The number of graphs that ``generate`` compiles for tokens behind a static cache."""
    made: list[Any] = []

    def counted(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph.forward

    ids = texts()[:, :5]
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    compiling = CompileConfig(backend=counted, fullgraph=True, mode=None)
    compiling._compile_all_devices = True  # on CPUs generate does not compile by itself
    options |= {"cache_implementation": "static", "compile_config": compiling}
    torch.compiler.reset()
    assert torch.equal(model.generate(ids, **options), expected)
    return len(made)


@pytest.mark.parametrize(
    ("kind", "method"),
    [("llama", "self_extend"), ("llama", "rerope+log_n"), ("gemma3_text", "rerope")],
)
def test_steps_share_the_graphs_that_they_had(kind: str, method: str) -> None:
    """They read no length of the cache, and no size changes but as windows fill."""
    assert graphs_of_generation(stretched(method, kind)) == graphs_of_generation(model_of(kind))


def test_compiled_passes_of_several_tokens() -> None:
    model = stretched("rerope+log_n")
    expected = step(model, DynamicCache(), 0, 40)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache = fixed(model)
    begun = step(model, cache, 0, 13)
    parts = [begun, *(step(compiled, cache, t, t + 9) for t in (13, 22, 31))]
    assert near(expected, torch.cat(parts, 1))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_copies_and_emptied_caches(kind: str) -> None:
    model = stretched("rerope+log_n", kind)
    expected = step(model, DynamicCache(config=model.config), 0, 40)
    cache = fixed(model)
    for _ in range(2):
        cache.reset()
        step(model, cache, 0, 20)
        other = copy.deepcopy(cache)
        step(model, cache, 25, 40)
        parts = [step(model, other, t, t + 5) for t in (20, 25, 30, 35)]
        assert near(expected[:, 20:], torch.cat(parts, 1))


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_their_own_after_one_for_all(static: bool) -> None:
    """A pass without positions has one row of them, the next may have one a row of the batch."""
    model = stretched("rerope+log_n")
    places = torch.arange(20, 40).repeat(2, 1)
    places[1] += 9
    whole = torch.cat([torch.arange(20).repeat(2, 1), places], 1)
    expected = step(model, DynamicCache(), 0, 40, position_ids=whole)[:, 20:]
    cache = fixed(model) if static else DynamicCache()
    step(model, cache, 0, 20)
    first = step(model, cache, 20, 30, position_ids=places[:, :10])
    last = step(model, cache, 30, 40, position_ids=places[:, 10:])
    assert near(expected, torch.cat([first, last], 1))
