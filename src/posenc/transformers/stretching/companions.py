"""Companions of a cache's layer (positions, say), reordered, cropped and reset with its keys.

They are no layers of the cache, and the layer keeps its class: transformers counts the layers, and
exports those of its own classes alone.
"""

from __future__ import annotations

import weakref
from typing import Any

from transformers.cache_utils import CacheLayerMixin

COMPANIONS = "_posenc_companions"
"""Attribute of layers that holds their companions."""

FOLLOWED = (
    "reorder_cache",
    "crop",
    "batch_repeat_interleave",
    "batch_select_indices",
    "reset",
    "get_mask_sizes",
)
"""Methods of layers that are called on their companions too."""


def companions(layer: object) -> tuple[CacheLayerMixin, ...]:
    """Companions of a layer of a cache."""
    layers: tuple[CacheLayerMixin, ...] = getattr(layer, COMPANIONS, ())
    return layers


def add_companions(layer: CacheLayerMixin, *layers: CacheLayerMixin) -> None:
    """Add companions, which are reordered, repeated, cropped and reset as the layer's keys are."""
    setattr(layer, COMPANIONS, (*companions(layer), *layers))
    for name in FOLLOWED:
        setattr(layer, name, _CompanionMethod(layer, name))


class _CompanionMethod:
    """A method of a layer, called on its companions first."""

    def __init__(self, layer: CacheLayerMixin, name: str) -> None:
        self.layer = weakref.ref(layer)  # a cycle would hold on to the memory of caches
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        layer = self.layer()
        for companion in companions(layer):
            getattr(companion, self.name)(*arguments, **options)
        return getattr(type(layer), self.name)(layer, *arguments, **options)

    def __reduce__(self) -> Any:
        return _CompanionMethod, (self.layer(), self.name)
