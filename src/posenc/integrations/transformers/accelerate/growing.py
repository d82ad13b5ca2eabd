"""Layers of transformers' dynamic caches with room for tokens to come.

transformers copies all cached keys and values to add one token's; at 32,768 tokens that takes
longer than attention does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from posenc.integrations.transformers.accelerate.signatures import caches_in
from posenc.runtime import is_scripted, is_transformed

Pair = tuple[Float[Tensor, "B G K D"], Float[Tensor, "B G K E"]]
"""Keys and values."""

LEAST = 256
"""Tokens that a new buffer has room for at least."""


class Growing(DynamicLayer):
    """A layer whose keys and values lie in larger buffers, where the next tokens' are written.

    Nothing that was handed out is overwritten: keys that are not those of the last update (cropped,
    reordered, set) begin new buffers. With gradients, in graphs and off the CPU it copies as
    transformers does. A layer becomes one by assignment to its ``__class__``; copies and pickles
    of it are of the class it had.
    """

    original: ClassVar[type[DynamicLayer]] = DynamicLayer
    keys: Any
    values: Any
    _buffers: Pair | None = None
    _filled: int = 0
    """Tokens in the buffers."""
    _last: Pair | None = None
    """Keys and values as the last update left them, the end of what is filled."""

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **options: Any) -> Any:
        new = (key_states, value_states)
        if not self.is_initialized or not all(map(_extends, (self.keys, self.values), new)):
            self._buffers = self._last = None
            return super().update(key_states, value_states, *others, **options)
        whole = self._append(new)
        self.keys, self.values = self._last = self._kept(whole, key_states.shape[2])
        return whole

    def _kept(self, whole: Pair, added: int) -> Pair:
        """Keys and values that later tokens attend to."""
        return whole

    def _append(self, new: Pair) -> Pair:
        """Write the keys and values of new tokens behind those held; returns both together."""
        held, added = self.keys.shape[2], new[0].shape[2]
        buffers, begin = self._buffers, self._filled
        if buffers is None or not self._is_last() or begin + added > buffers[0].shape[2]:
            size = held + added + max(LEAST, held // 4)
            buffers, begin = (_buffer(self.keys, size), _buffer(self.values, size)), held
        end = begin + added
        for buffer, x in zip(buffers, new, strict=True):
            buffer[:, :, begin:end] = x
        self._buffers, self._filled = buffers, end
        keys, values = (buffer[:, :, begin - held : end] for buffer in buffers)
        return keys, values

    def _is_last(self) -> bool:
        """True if the layer holds what the last update left, in buffers that can be written to."""
        if self._buffers is None or self._last is None:
            return False
        frozen = self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()
        return self.keys is self._last[0] and self.values is self._last[1] and not frozen

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = ("_buffers", "_filled", "_last")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        if self._buffers is not None:  # pickles hold the whole memory of a view
            state |= {"keys": self.keys.clone(), "values": self.values.clone()}
        return self.original.__new__, (self.original,), state


class GrowingWindow(Growing, DynamicSlidingWindowLayer):
    """The same for a layer that keeps a window of the last tokens."""

    original = DynamicSlidingWindowLayer

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **options: Any) -> Any:
        method = DynamicSlidingWindowLayer.update if self.record_past else Growing.update
        return method(self, key_states, value_states, *others, **options)

    def _kept(self, whole: Pair, added: int) -> Pair:
        self.cumulative_length += added
        keys, values = (x[:, :, 1 - self.sliding_window :] for x in whole)
        return keys, values


KINDS: dict[type[CacheLayerMixin], type[Growing]] = {
    kind.original: kind for kind in (Growing, GrowingWindow)
}


def grow(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Give the layers of the cache that a model is called with room to grow; a hook before it.

    Layers of other classes are left alone.
    """
    if torch.compiler.is_compiling() or is_scripted():
        return
    for cache in caches_in((*inputs, *options.values())):
        for layer in cache.layers:
            kind = KINDS.get(type(layer))
            if kind is not None:
                layer.__class__ = kind


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
