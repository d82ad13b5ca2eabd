"""Keys of caches at other positions: ``moved`` and ``joined``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from posenc.arguments import EXACT, Interval, check
from posenc.encoding.rotation import Factors
from posenc.errors import ArgumentError
from posenc.transformers.caches.rotations import (
    NAMES,
    RECURRENT,
    CachedLayer,
    CachedRotation,
    count_of,
    is_empty,
    known,
    length_of,
    read_layers,
)

GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that replace their keys and values with each update."""


@torch.no_grad()
def moved(model: nn.Module, cache: Cache, *, by: int, in_place: bool = False) -> Cache:
    """A cache as if its text had begun ``by`` tokens later.

    A pair of features of frequency θ, as a complex number k, becomes k · exp(i · by · θ): angles
    are computed in float64, products in float32 or better, and keys rounded once. All layers are
    then those of a pass at ``position_ids + by``, as rotary attention sees differences alone; of
    models whose queries grow with their position (Llama 4, Dory) only the first. The length of the
    cache stays; later passes need the ``position_ids`` that follow.

    The first call on a model reads its rotations from two passes of a few tokens: any scaling,
    pairing, share of a head and pattern of layers. Keys without positions (of ALiBi, T5 or layers
    without a rotation) stay as they are.

    Args:
        model: of transformers, which filled the cache.
        cache: with dynamic or static layers, of all tokens or a window.
        by: tokens; negative ones move it to the front.
        in_place: move the keys of this cache; else those of a copy, which shares what no update
            writes into.

    Raises:
        ArgumentError: for keys that no rotation moves (learned positions, weighted norms behind a
            rotation), caches of other layers, and lengths at which frequencies change (dynamic NTK,
            LongRoPE).
    """
    by = check("by", Annotated[int, Interval(-EXACT, EXACT)], by)
    in_place = check("in_place", bool, in_place)
    read = read_layers(model, [cache], [by])
    new = cache if in_place else copy(cache)
    factors = functools.cache(CachedRotation.factors)  # most layers share a rotation
    new.layers = [
        _moved(layer, one.rotations, partial(factors, by=by), in_place)
        for layer, one in zip(cache.layers, read, strict=True)
    ]
    return new


def _moved(
    layer: Any,
    rotations: Sequence[CachedRotation | None],
    factors: Callable[..., Factors],
    in_place: bool,
) -> Any:
    new = layer if in_place else _copied(layer)
    count = count_of(layer)
    for name, rotation in zip(NAMES, rotations, strict=False):
        if rotation is None or not count:
            continue
        held = getattr(new, name)[:, :, :count]
        fresh = not in_place and type(layer) in GROWING
        out = torch.empty_like(held, memory_format=torch.contiguous_format) if fresh else held
        rotation.write(out, held, factors(rotation, dtype=held.dtype, device=held.device))
        if fresh:
            setattr(new, name, out)
    return new


@torch.no_grad()
def joined(model: nn.Module, caches: Sequence[Cache]) -> Cache:
    """One cache of several texts in a row, each read alone from position 0 on.

    Each is ``moved`` behind those before it. In the first layer the result is that of reading all
    at once; in deeper ones not, since no text has seen those before it.

    Args:
        model: of transformers, which filled the caches.
        caches: of the same rows and kinds of layers. The result is one of the first one's kind; a
            static one needs room for all tokens. They stay as they are.

    Returns:
        A cache with memory of its own, for tokens whose positions follow.

    Raises:
        ArgumentError: also for caches that do not fit one another, and recurrent layers.
    """
    if not isinstance(caches, Sequence) or not caches:
        raise ArgumentError(
            "caches",
            expected="a sequence of caches",
            got="none" if caches == [] else type(caches).__name__,
            remedy="Pass those of the texts in their order.",
        )
    for cache in caches:
        _require_appendable(cache)
    caches = [cache for cache in caches if length_of(cache)] or caches[:1]
    lengths = [length_of(cache) for cache in caches]
    starts = [0, *accumulate(lengths)][:-1]
    read = read_layers(model, caches, starts)
    new = copy(caches[0])
    new.layers = []
    for number, one in enumerate(read):
        layers = [cache.layers[number] for cache in caches]
        _require_alike(number, layers)
        new.layers.append(_joined(layers, one, starts, sum(lengths)))
    return new


def _joined(layers: list[Any], read: CachedLayer, starts: list[int], total: int) -> Any:
    """Layers of several caches as one, for so many tokens."""
    new, counts = _copied(layers[0]), [count_of(layer) for layer in layers]
    if not read.shapes or not sum(counts):
        return new
    kept = sum(counts)
    if isinstance(new, StaticSlidingWindowLayer):
        kept = min(kept, new.max_cache_len)
    elif isinstance(new, StaticLayer) and total > new.max_cache_len:
        raise ArgumentError(
            "caches",
            expected=f"a first one with room for all {total:,} tokens",
            got=f"one of {new.max_cache_len:,}",
            remedy="Fill a larger StaticCache first, or a DynamicCache.",
        )
    elif isinstance(new, DynamicSlidingWindowLayer) and not new.record_past:
        kept = min(kept, new.sliding_window - 1)
    for name, rotation in zip(NAMES, read.rotations, strict=True):
        parts = [getattr(layer, name)[:, :, :n] for layer, n in zip(layers, counts, strict=True)]
        heads, features = parts[0].shape[1], parts[0].shape[3]
        whole = parts[0].new_empty(len(parts[0]), heads, sum(counts), features)
        ends = list(accumulate(counts))
        for part, by, end in zip(parts, starts, ends, strict=True):
            out = whole[:, :, end - part.shape[2] : end]
            if rotation is None or not by:
                out.copy_(part)
            else:
                rotation.write(out, part, rotation.factors(by, part.dtype, part.device))
        last = whole[:, :, sum(counts) - kept :]
        if isinstance(new, StaticLayer):
            getattr(new, name)[:, :, :kept] = last
        else:
            setattr(new, name, last)
    if isinstance(new, StaticLayer):
        new.cumulative_length.fill_(total)
    for name in ("cumulative_length", "cumulative_length_int"):
        if isinstance(getattr(new, name, None), int):
            setattr(new, name, total)
    return new


def _require_appendable(cache: Cache) -> None:
    """Require a cache of keys alone.

    Raises:
        ArgumentError: for another.
    """
    for number, layer in enumerate(known(cache).layers):
        if type(layer) in RECURRENT:
            raise ArgumentError(
                "caches",
                expected="attention layers, whose keys can be appended",
                got=f"{type(layer).__name__} in layer {number}, with a state of the whole text",
                remedy="Read the texts as one.",
            )


def _require_alike(number: int, layers: list[Any]) -> None:
    """Require layers that can be joined.

    Raises:
        ArgumentError: for others.
    """
    first, *others = layers
    for other in others:
        if type(other) is not type(first):
            got = f"{type(first).__name__} and {type(other).__name__} in layer {number}"
        elif is_empty(first):
            continue
        elif (a := _row(first)) != (b := _row(other)):
            got = f"{a} and {b} in layer {number}"
        else:
            continue
        raise ArgumentError(
            "caches",
            expected="the same kinds of layers, rows, dtypes and devices",
            got=got,
            remedy="Fill them by the same model, with as many rows each.",
        )


def _row(layer: Any) -> str:
    """Rows, dtype and device of a layer's keys, and its window, in words."""
    window = getattr(layer, "sliding_window", None)
    words = f"{len(layer.keys)} rows of {layer.keys.dtype} on {layer.keys.device}"
    return words + (f" of the last {window}" if window else "")


def _copied(layer: Any) -> Any:
    """A copy of a layer, with memory of its own if updates write into it."""
    new = copy(layer)
    if type(layer) not in GROWING:
        new.__dict__.update(tree_map_only(Tensor, lambda x: x.detach().clone(), vars(layer)))
    return new
