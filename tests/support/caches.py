"""Caches of transformers' models, whose names differ between versions."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Cache

from posenc.transformers.calls import CACHES, cache_name, names_of


def given(model: nn.Module, cache: Cache | None) -> dict[str, Any]:
    """A cache as the argument that a model, a compiled one or a layer calls it."""
    name = cache_name(names_of(getattr(model, "_orig_mod", model).forward))
    assert name is not None, f"{type(model).__name__} takes no cache"
    return {name: cache}


def cache_of(output: Any) -> Any:
    """The cache in an output, or in what ``generate`` returns; None if there is none."""
    return next((output[name] for name in CACHES if name in output), None)
