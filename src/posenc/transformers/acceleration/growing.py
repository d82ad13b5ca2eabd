"""Layers of transformers' dynamic caches with spare capacity for later tokens.

transformers copies all cached keys and values to add one token's; at 32,768 tokens that takes
longer than attention does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from posenc.runtime import is_scripted, is_transformed
from posenc.transformers.calls import caches_in

Pair = tuple[Float[Tensor, "B G K D"], Float[Tensor, "B G K E"]]
"""Keys and values."""

LEAST = 256
"""Least spare capacity of a new buffer, in tokens."""

COPIED = 2**18
"""Bytes of keys, and of values, up to which a copy takes no longer than what saves it."""


@dataclass(eq=False)
class Buffers:
    """Buffers of keys and values with spare capacity, which copies and pickles drop.

    Args:
        pair: of keys and of values.
        filled: tokens in them.
        last: keys and values as the last update left them, the end of what is filled.
    """

    pair: Pair
    filled: int
    last: Pair

    def take(self, held: Pair, added: int) -> bool:
        """True if these keys and values end the memory, which has room and may be written to."""
        frozen = self.pair[0].is_inference() and not torch.is_inference_mode_enabled()
        if frozen or self.filled + added > self.pair[0].shape[2]:
            return False
        ends = _ends(self.pair, self.filled, held[0].shape[2])
        triples = zip(held, self.last, ends, strict=True)
        return all(x is last and x.data_ptr() == end.data_ptr() for x, last, end in triples)

    def append(self, new: Pair) -> None:
        """Append the keys and values of new tokens."""
        end = self.filled + new[0].shape[2]
        for buffer, x in zip(self.pair, new, strict=True):
            buffer[:, :, self.filled : end] = x
        self.filled = end

    def __reduce__(self) -> Any:
        return cast, (None, None)  # a function of Python that returns its argument


class Growing(DynamicLayer):
    """A layer whose keys and values lie in larger buffers, where the next tokens' are written.

    Nothing that was handed out is overwritten: keys that are not those of the last update (cropped,
    reordered, set) begin new buffers. With gradients, in graphs and off the CPU it copies as
    transformers does. A layer is one during a pass alone: by its own class transformers knows what
    it can export and copy.
    """

    original: ClassVar[type[DynamicLayer]] = DynamicLayer
    keys: Any
    values: Any
    _posenc_buffers: Buffers | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **options: Any) -> Any:
        new, held = (key_states, value_states), (self.keys, self.values)
        short = not self.is_initialized or held[0].nbytes <= COPIED
        if short or not all(map(_extends, held, new)):
            self._posenc_buffers = None
            return super().update(key_states, value_states, *others, **options)
        count, added = held[0].shape[2], key_states.shape[2]
        buffers = self._posenc_buffers
        if buffers is None or not buffers.take(held, added):
            size = count + added + max(LEAST, count // 4)
            pair = _buffer(held[0], size), _buffer(held[1], size)
            buffers = self._posenc_buffers = Buffers(pair, count, held)
        buffers.append(new)
        extended = _ends(buffers.pair, buffers.filled, count + added)
        self.keys, self.values = buffers.last = self._attended(extended, added)
        return extended

    def _attended(self, pair: Pair, added: int) -> Pair:
        """Keys and values that later tokens attend to."""
        return pair


class GrowingWindow(Growing, DynamicSlidingWindowLayer):
    """``Growing`` for a layer that keeps a window of the last tokens."""

    original = DynamicSlidingWindowLayer

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **options: Any) -> Any:
        method = DynamicSlidingWindowLayer.update if self.record_past else Growing.update
        return method(self, key_states, value_states, *others, **options)

    def _attended(self, pair: Pair, added: int) -> Pair:
        self.cumulative_length += added
        keys, values = (x[:, :, 1 - self.sliding_window :] for x in pair)
        return keys, values


KINDS: dict[type[CacheLayerMixin], type[Growing]] = {
    kind.original: kind for kind in (Growing, GrowingWindow)
}


def grow(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Pre-forward hook: give the layers of the call's cache spare capacity.

    Layers of other classes are left alone.
    """
    for layer in _layers((*inputs, *options.values())):
        kind = KINDS.get(type(layer))
        if kind is not None:
            layer.__class__ = kind


def settle(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], _: Any) -> None:
    """Give the layers their own classes back; a hook after the model, also where it raises."""
    for layer in _layers((*inputs, *options.values())):
        if isinstance(layer, Growing):
            layer.__class__ = layer.original


def _layers(values: tuple[Any, ...]) -> Iterator[CacheLayerMixin]:
    if torch.compiler.is_compiling() or is_scripted():
        return
    for cache in caches_in(values):
        yield from cache.layers


def _ends(pair: Pair, end: int, count: int) -> Pair:
    """The last ``count`` tokens before ``end``."""
    keys, values = (x[:, :, end - count : end] for x in pair)
    return keys, values


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
