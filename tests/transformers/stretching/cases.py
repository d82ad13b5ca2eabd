"""Tiny models to stretch, and how their outputs are compared."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.support.caches import cache_of, given
from tests.support.tiny_models import VOCABULARY, tiny_model
from tests.transformers.stretching.sweep import difference, first

WINDOW = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}

SIZES: dict[str, dict[str, Any]] = {
    "gemma3_text": WINDOW,
    "gemma2": {"attn_implementation": "eager"},  # sdpa leaves its cap out before 5.21
    "gpt_oss": WINDOW,
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {"layer_types": ["chunked_attention"] * 2, "no_rope_layers": [1, 1]},
}
"""Of model types whose pattern of layers is wanted in two."""

FREE = {"length": 4000, "window": 3000, "windows": True}
"""Arguments of ReRoPE under which it changes nothing."""


def model_of(kind: str, **sizes: Any) -> Any:
    """A fresh model of a type."""
    return tiny_model(kind, **SIZES.get(kind, {}) | sizes)


@cache
def texts(length: int = 40) -> Tensor:
    """Two rows of ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (2, length), generator=generator)


def placed(attended: Tensor) -> dict[str, Tensor]:
    """A mask of padding, and positions that count what it shows."""
    places = (attended.cumsum(1) - 1).clamp(min=0)
    return {"attention_mask": attended, "position_ids": places}


def padded(number: int = 9) -> dict[str, Tensor]:
    """The same with so much padding on the left of the first row."""
    attended = torch.ones_like(texts())
    attended[0, :number] = 0
    return placed(attended)


@torch.no_grad()
def outputs(model: Any, **options: Any) -> Tensor:
    """Logits of one pass without a cache."""
    if "inputs_embeds" not in options:
        options = {"input_ids": texts()} | options
    return first(model(**options, use_cache=False))


@torch.no_grad()
def decoded(model: Any, start: int = 25) -> Tensor:
    """Logits of a prefill and of single tokens after it."""
    ids = texts()
    prefill = model(ids[:, :start], use_cache=True)
    parts = [prefill.logits]
    for t in range(start, ids.shape[1]):
        step = ids[:, t : t + 1]
        parts.append(model(step, use_cache=True, **given(model, cache_of(prefill))).logits)
    return torch.cat(parts, 1)


def near(expected: Tensor, got: Tensor) -> bool:
    """True if outputs are equal up to rounding."""
    return difference(expected, got) < 1e-5
