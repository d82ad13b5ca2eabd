"""Tiny models whose caches are moved, and passes that fill them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from posenc.transformers.calls import names_of
from tests.support.caches import cache_of, given
from tests.transformers.stretching.cases import model_of

TRAINED = 64
"""Trained length of the models of ``SCALED``."""

ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED}

SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "yarn": {"attention_factor": 1.3},
    "longrope": {"short_factor": [1.1] * 8, "long_factor": [1.5 + t / 4 for t in range(8)]},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Parameters of RoPE beside ``ROPE``, by ``rope_type``."""

FULL_WIDTH = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
BY_TYPE = {"sliding_attention": LOCAL}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("llama", {}),
    "bases by layer": (
        "gemma3_text",
        {"rope_parameters": BY_TYPE | {"full_attention": {"rope_type": "linear"} | ROPE}},
    ),
    "yarn in some layers": (
        "olmo3",
        LAYERS
        | {
            "rope_parameters": BY_TYPE
            | {"full_attention": {"rope_type": "yarn", "attention_factor": 1.2} | ROPE}
        },
    ),
    "proportional": (
        "gemma4_text",
        LAYERS | {"rope_parameters": BY_TYPE | {"full_attention": FULL_WIDTH}},
    ),
    "windows and sinks": ("gpt_oss", {}),
    "part of a head": ("gpt_neox", {}),
    "interleaved": ("cohere", {}),
    "interleaved part": ("glm4", {}),
    "a table of sines": ("gptj", {}),
    "latent": ("deepseek_v3", {}),
    "latent, interleaved": ("deepseek_v3", {"rope_interleave": True}),
    "complex": ("llama4_text", {}),
    "layers without": ("smollm3", {}),
    "three axes": ("qwen2_5_vl_text", {}),
    "beside recurrent layers": ("qwen3_next", {}),
    "linear biases": ("bloom", {}),
}


@contextmanager
def double_precision() -> Iterator[None]:
    """transformers computes norms and angles in float64 too, where it asks for float32."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def scaled(kind: str, **sizes: Any) -> Any:
    """A Llama with this scaling."""
    parameters = {"rope_type": kind} | ROPE | SCALED[kind]
    longest = TRAINED if kind == "dynamic" else 4 * TRAINED
    sizes = {"rope_parameters": parameters, "max_position_embeddings": longest} | sizes
    with double_precision():
        return model_of("llama", **sizes).double()


def model_named(name: str, **sizes: Any) -> Any:
    """A model of ``MODELS``."""
    kind, options = MODELS[name]
    with double_precision():
        model = model_of(kind, **options | sizes).double()
    model.config._experts_implementation = "eager"  # products of groups have no float64
    return model


@torch.no_grad()
def read(
    model: Any, ids: Tensor, start: int | None = 0, cache: Cache | None = None, **options: Any
) -> Any:
    """A pass over texts at positions from ``start`` on; None: where the model puts them."""
    if start is not None and "position_ids" in names_of(model.forward):
        options["position_ids"] = (torch.arange(ids.shape[1]) + start)[None].expand(len(ids), -1)
    with double_precision():
        options |= {} if cache is None else given(model, cache)
        return model(input_ids=ids, use_cache=True, **options)


def filled(model: Any, ids: Tensor, start: int | None = 0, cache: Cache | None = None) -> Any:
    """The cache of a pass."""
    return cache_of(read(model, ids, start, cache))


def empty(model: Any, kind: str, room: int = 48) -> Cache:
    """An empty cache."""
    config = model.config
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, room)


def held(cache: Any) -> list[list[Tensor]]:
    """Keys and values of each layer that has some, without free room."""
    layers = [x for x in cache.layers if isinstance(getattr(x, "keys", None), Tensor)]
    counts = [min(int(x.get_seq_length()), x.keys.shape[2]) for x in layers]
    return [[y[:, :, :n] for y in (x.keys, x.values)] for x, n in zip(layers, counts, strict=True)]


def error(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """The largest difference, as a share of the largest number."""
    pairs = [p for a, b in zip(one, other, strict=True) for p in zip(a, b, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
