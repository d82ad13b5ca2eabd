"""One more token of a stretched layer, with rotated keys kept beside transformers' cache."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer

from posenc.attention import attend
from posenc.attention.backends.common.definition import softmax_beside
from posenc.attention.backends.common.fused import fold_heads
from posenc.attention.problem.once import once_for_part
from posenc.encoding import Encoding, apply_rotation
from posenc.extension.banded import BandedRope
from posenc.extension.methods.log_n import LogN
from posenc.grid import Grid

PLAIN = Encoding()


class RotatedKeys(DynamicLayer, DummyLayer):  # type: ignore[misc]
    """Keys ``[B, G, T, D]`` of an attention layer after a rotation, as one more layer of its cache.

    So they are reordered, repeated, cut and reset as the keys are. New ones are written behind the
    others, in memory that doubles when it is full.

    Args:
        layer: index of the attention layer.
    """

    is_compileable, supports_early_init = True, False

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.is_initialized = False
        self.room: Tensor | None = None

    def extend(self, new: Float[Tensor, "B G N D"]) -> Float[Tensor, "B G T D"]:
        """All keys so far, with the new ones."""
        begin = self.get_seq_length()
        end = begin + new.shape[2]
        room = self.room
        foreign = room is not None and room.is_inference() and not torch.is_inference_mode_enabled()
        if (
            room is None
            or foreign
            or room.shape[2] < end
            or (begin and room.data_ptr() != self.keys.data_ptr())
        ):
            room = new.new_empty(*new.shape[:2], 2 * end, new.shape[3])
            if begin:
                room[:, :, :begin] = self.keys
        room[:, :, begin:end] = new
        self.room, self.keys, self.values = room, room[:, :, :end], room[:, :, :0]
        self.dtype, self.device, self.is_initialized = room.dtype, room.device, True
        return self.keys

    def __deepcopy__(self, memo: dict[int, Any]) -> RotatedKeys:
        copied = RotatedKeys(self.layer)
        if self.is_initialized:
            copied.extend(self.keys)
        return copied


def attend_last(
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    cache: Cache,
    layer: int,
    *,
    scale: float,
    sinks: Float[Tensor, " H"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H 1 E"] | None:
    """``attend`` for one query, rotating only the keys that are new; None where it is not served.

    Served are rotations of each key by its position alone, in float32 or better.

    Args: as ``attend``.
        cache, layer: that the keys are from.
    """
    transform, score = encoding.query_key, encoding.score
    if not served(encoding, grid) or query.dtype.itemsize < 4:
        return None
    kept = [x for x in cache.layers if isinstance(x, RotatedKeys) and x.layer == layer]
    keys = key.shape[2]
    begin = kept[0].get_seq_length() if kept else 0
    if begin >= keys:
        return None
    new = key[:, :, begin:]
    if transform is not None:
        sides = grid.query, grid.key.slice(begin, keys)
        query, rotated = transform(query, new, Grid(*sides, causal=True))
        if rotated.shape != new.shape:
            return None
        if score is None:
            kept = kept or _appended(cache, layer, 1)
            softmax: dict[str, Any] = {"sinks": sinks, "softcap": softcap}
            return attend(
                query, kept[0].extend(rotated), value, grid, PLAIN, scale=scale, **softmax
            )
    assert isinstance(score, BandedRope)
    rotations, bands = once_for_part(
        score, grid, lambda grid: score.of_last(grid, begin), ("last", begin)
    )
    kept = kept or _appended(cache, layer, len(rotations))
    pairing = score.rope.pairing
    for held, rotation in zip(kept, rotations, strict=True):
        held.extend(apply_rotation(new, *rotation, pairing))
    logits = query.new_empty(*key.shape[:2], query.shape[1] // key.shape[1], keys)
    for band in bands:
        shown = logits[..., band.keys]
        rotated = key if band.rotation is None else kept[band.rotation].keys
        turned = fold_heads(apply_rotation(query * scale, *band.query, pairing), key)
        product = turned @ rotated[:, :, band.keys].mT
        shown.copy_(product if band.pairs is None else product.where(band.pairs, shown))
    logits = logits.view(*query.shape[:3], keys)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    visible = once_for_part(score, grid, lambda grid: grid.visible, ("visible",))
    weights = softmax_beside(logits, visible, sinks)
    return (fold_heads(weights, value) @ value).view(*query.shape[:3], -1)


def served(encoding: Encoding, grid: Grid) -> bool:
    """True if keys are rotated by their own positions alone, and nothing is trained."""
    transform, score = encoding.query_key, encoding.score
    if next(encoding.parameters(), None) is not None or encoding.value is not None:
        return False
    if isinstance(score, BandedRope):
        return transform is None or (isinstance(transform, LogN) and transform.inner is None)
    return score is None and transform is not None and transform.tokenwise and grid.causal


def _appended(cache: Cache, layer: int, count: int) -> list[RotatedKeys]:
    """Empty layers for the rotations of a layer's keys."""
    found = [RotatedKeys(layer) for _ in range(count)]
    cache.layers += found
    return found
