"""Layers of transformers' dynamic caches with room for tokens to come.

transformers copies all cached keys and values to add one token's; at 32,768 tokens that takes
longer than attention does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from posenc.integrations.transformers.accelerate.signatures import caches_in
from posenc.runtime import is_scripted, is_transformed

Pair = tuple[Float[Tensor, "B G K D"], Float[Tensor, "B G K E"]]
"""Keys and values."""

LEAST = 256
"""Tokens that a new buffer has room for at least."""


class Growing:
    """The ``update`` of a layer whose keys and values lie in larger buffers, room for more behind.

    Nothing that was handed out is overwritten: keys that are not those of the last update (cropped,
    reordered, set) begin new buffers. With gradients, in graphs and off the CPU it copies as
    transformers does. The layer keeps its class, by which transformers knows what it can export;
    copies and pickles of it have the ``update`` of that class.
    """

    def __init__(self, layer: DynamicLayer) -> None:
        self._layer = weakref.ref(layer)  # a cycle would hold on to the memory of caches
        self._buffers: Pair | None = None
        self._filled = 0  # tokens in the buffers
        self._last: Pair | None = None  # as the last update left them, the end of what is filled

    def __call__(self, key_states: Tensor, value_states: Tensor, *others: Any, **kw: Any) -> Pair:
        layer, new = self._layer(), (key_states, value_states)
        assert layer is not None
        recording = getattr(layer, "record_past", False)
        held = (layer.keys, layer.values)
        if recording or not layer.is_initialized or not all(map(_extends, held, new)):
            self._buffers = self._last = None
            copied: Pair = type(layer).update(layer, *new, *others, **kw)
            return copied
        whole = self._append(held, new)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += key_states.shape[2]
            keys, values = (x[:, :, 1 - layer.sliding_window :] for x in whole)
            layer.keys, layer.values = self._last = keys, values
        else:
            layer.keys, layer.values = self._last = whole
        return whole

    def _append(self, held: Pair, new: Pair) -> Pair:
        """Write the keys and values of new tokens behind those held; returns both together."""
        count, added = held[0].shape[2], new[0].shape[2]
        buffers, begin = self._buffers, self._filled
        if buffers is None or not self._is_last(held) or begin + added > buffers[0].shape[2]:
            size = count + added + max(LEAST, count // 4)
            buffers, begin = (_buffer(held[0], size), _buffer(held[1], size)), count
        end = begin + added
        for buffer, x in zip(buffers, new, strict=True):
            buffer[:, :, begin:end] = x
        self._buffers, self._filled = buffers, end
        keys, values = (buffer[:, :, begin - count : end] for buffer in buffers)
        return keys, values

    def _is_last(self, held: Pair) -> bool:
        """True if the layer holds what the last update left, in buffers that can be written to."""
        if self._buffers is None or self._last is None:
            return False
        frozen = self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()
        return held[0] is self._last[0] and held[1] is self._last[1] and not frozen

    def __reduce__(self) -> Any:
        return getattr, (self._layer(), "update")  # of the class, as copies have none yet


def grow(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Give the layers of the cache that a model is called with room to grow; a hook before it.

    Layers of other classes are left alone.
    """
    if torch.compiler.is_compiling() or is_scripted():
        return
    for cache in caches_in((*inputs, *options.values())):
        for layer in cache.layers:
            known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            if known and not isinstance(layer.update, Growing):
                layer.update = Growing(layer)


def _extends(old: Tensor, new: Tensor) -> bool:
    """True if a token's numbers can be written behind those before."""
    alike = (old.dtype, old.shape[:2], old.shape[3:]) == (new.dtype, new.shape[:2], new.shape[3:])
    on_cpu = old.device == new.device and old.device.type == "cpu"
    traced = torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed()
    return alike and on_cpu and old.dim() == 4 and not traced


def _buffer(held: Tensor, size: int) -> Tensor:
    """Room for so many tokens, which begins with those held."""
    buffer = held.new_empty(*held.shape[:2], size, held.shape[3])
    buffer[:, :, : held.shape[2]] = held
    return buffer
