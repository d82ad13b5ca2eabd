"""Stretched models with caches of a fixed size, whose decoding is compiled once for all lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from posenc.transformers import stretch
from tests.support.caches import given
from tests.transformers.stretching.cases import model_of, near, texts

MOST = 48


def stretched(kind: str, method: str = "rerope+log_n") -> Any:
    model = model_of(kind)
    options: dict[str, Any] = {"factor": 4} if method == "self_extend" else {"window": 6}
    stretch(model, method, length=16, **options)
    return model


def fixed(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=MOST)


@torch.no_grad()
def step(model: Any, cache: Any, begin: int, end: int, **options: Any) -> Tensor:
    logits: Tensor = model(texts()[:, begin:end], **given(model, cache), **options).logits
    return logits


def graphs_of_generation(model: Any) -> int:
    """The number of graphs that ``generate`` compiles for tokens behind a static cache."""
    made: list[Any] = []

    def counted(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph.forward

    ids = texts()[:, :5]
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    compiling = CompileConfig(backend=counted, fullgraph=True, mode=None)  # type: ignore[arg-type]
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
    assert graphs_of_generation(stretched(kind, method)) == graphs_of_generation(model_of(kind))


def test_compiled_passes_of_several_tokens() -> None:
    model = stretched("llama")
    expected = step(model, DynamicCache(), 0, 40)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache = fixed(model)
    begun = step(model, cache, 0, 13)
    parts = [begun, *(step(compiled, cache, t, t + 9) for t in (13, 22, 31))]
    assert near(expected, torch.cat(parts, 1))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_copies_and_emptied_caches(kind: str) -> None:
    model = stretched(kind)
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
    model = stretched("llama")
    places = torch.arange(20, 40).repeat(2, 1)
    places[1] += 9
    whole = torch.cat([torch.arange(20).repeat(2, 1), places], 1)
    expected = step(model, DynamicCache(), 0, 40, position_ids=whole)[:, 20:]
    cache = fixed(model) if static else DynamicCache()
    step(model, cache, 0, 20)
    parts = [
        step(model, cache, t, t + 10, position_ids=places[:, t - 20 : t - 10]) for t in (20, 30)
    ]
    assert near(expected, torch.cat(parts, 1))
