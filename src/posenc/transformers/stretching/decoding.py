"""One more token of a stretched layer, with rotated keys kept beside transformers' cache."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from posenc.attention import attend
from posenc.attention.backends.common.fused import fold_heads
from posenc.attention.softmax import softmax_with_sinks
from posenc.encoding import Encoding, apply_rotation
from posenc.encoding.prepared import reused_of_grid
from posenc.extension.banded import BandedRope
from posenc.extension.methods.log_n import LogN
from posenc.grid import Grid
from posenc.transformers.stretching.companions import add_companions, companions

PLAIN = Encoding()


class RotatedKeys(DynamicLayer):
    """Keys ``[B, G, T, D]`` of an attention layer after a rotation, beside those of its cache.

    New ones are written behind the others, in memory that doubles when it is full.
    """

    keys: Any
    buffer: Tensor | None = None

    def extend(self, new: Float[Tensor, "B G N D"]) -> Float[Tensor, "B G T D"]:
        """Append new keys; returns all of them."""
        begin = self.get_seq_length()
        end = begin + new.shape[2]
        buffer = self.buffer
        if buffer is None or not (begin and self._fits(buffer, end)):
            buffer = new.new_empty(*new.shape[:2], 2 * end, new.shape[3])
            if begin:
                buffer[:, :, :begin] = self.keys
        buffer[:, :, begin:end] = new
        self.buffer, self.keys, self.values = buffer, buffer[:, :, :end], buffer[:, :, :0]
        self.dtype, self.device, self.is_initialized = buffer.dtype, buffer.device, True
        return buffer[:, :, :end]

    def _fits(self, buffer: Tensor, end: int) -> bool:
        """True if the buffer holds the keys, has space up to ``end`` and may be written."""
        frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
        return buffer.data_ptr() == self.keys.data_ptr() and buffer.shape[2] >= end and not frozen

    def __deepcopy__(self, memo: dict[int, Any]) -> RotatedKeys:
        copied = RotatedKeys()
        if self.is_initialized:
            copied.extend(self.keys)
        return copied


def rotated_keys(layer: DynamicLayer) -> tuple[RotatedKeys, ...]:
    """The keys of a cache's layer after each of their rotations, as far as they are kept."""
    return tuple(x for x in companions(layer) if isinstance(x, RotatedKeys))


def _begin(layer: DynamicLayer, count: int) -> tuple[RotatedKeys, ...]:
    """Begin to keep so many rotations of a layer's keys."""
    add_companions(layer, *(RotatedKeys() for _ in range(count)))
    return rotated_keys(layer)


def attend_last(
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    past: DynamicLayer,
    *,
    scale: float,
    sinks: Float[Tensor, " H"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H 1 E"] | None:
    """``attend`` for one query, rotating only the keys that are new; None where it is not served.

    Served are rotations of each key by its position alone, in float32 or better.

    Args: as ``attend``.
        past: the cache's layer that the keys are from.
    """
    transform, score = encoding.query_key, encoding.score
    if not served(encoding, grid) or query.dtype.itemsize < 4:
        return None
    before = rotated_keys(past)
    keys = key.shape[2]
    begin = before[0].get_seq_length() if before else 0
    if begin >= keys:
        return None
    new = key[:, :, begin:]
    if transform is not None:
        sides = grid.query, grid.key.slice(begin, keys)
        query, rotated = transform(query, new, Grid(*sides, causal=True))
        if rotated.shape != new.shape:
            return None
        if score is None:
            (held,) = before or _begin(past, 1)
            rotated = held.extend(rotated)
            return attend(
                *(query, rotated, value, grid, PLAIN), scale=scale, sinks=sinks, softcap=softcap
            )
    assert isinstance(score, BandedRope)
    rotations, bands = reused_of_grid(
        lambda grid: score.of_last(grid, begin), "of last", begin, grid=grid, layers=(score,)
    )
    before = before or _begin(past, len(rotations))
    pairing = score.rope.pairing
    for held, rotation in zip(before, rotations, strict=True):
        held.extend(apply_rotation(new, *rotation, pairing))
    logits = query.new_empty(*key.shape[:2], query.shape[1] // key.shape[1], keys)
    for band in bands:
        shown = logits[..., band.keys]
        rotated = key if band.rotation is None else before[band.rotation].keys
        turned, _ = fold_heads(apply_rotation(query * scale, *band.query, pairing), key)
        product = turned @ rotated[:, :, band.keys].mT
        shown.copy_(product if band.pairs is None else product.where(band.pairs, shown))
    logits = logits.view(*query.shape[:3], keys)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    visible = reused_of_grid(lambda grid: grid.visible, "visible", grid=grid)
    weights = softmax_with_sinks(logits, visible, sinks)
    return (fold_heads(weights, value)[0] @ value).view(*query.shape[:3], -1)


def served(encoding: Encoding, grid: Grid) -> bool:
    """True if keys are rotated by their own positions alone, and nothing is trained."""
    transform, score = encoding.query_key, encoding.score
    if next(encoding.parameters(), None) is not None or encoding.value is not None:
        return False
    if transform is not None and not (transform.tokenwise and grid.causal):
        return False
    scales = isinstance(transform, LogN) and transform.inner is None  # keys stay as they are
    if isinstance(score, BandedRope):
        return transform is None or scales
    return score is None and transform is not None and not scales
