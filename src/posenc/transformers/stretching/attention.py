"""Attention of stretched layers, in the attention interface of transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer

from posenc.attention import attend
from posenc.attention.backends.common.fused import fold_heads
from posenc.attention.softmax import softmax_with_sinks
from posenc.encoding import Encoding, apply_rotation, repeat_heads
from posenc.encoding.prepared import entering, reused_of_grid
from posenc.encoding.scaling import ScaledQueries
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.banded import BandedRope
from posenc.grid import Grid
from posenc.runtime import is_transformed
from posenc.transformers.acceleration.accelerated import STRETCHED, wants_weights
from posenc.transformers.acceleration.growing import Growing
from posenc.transformers.acceleration.interface import mask
from posenc.transformers.acceleration.masks import grid_behind, written_out
from posenc.transformers.acceleration.routing import (
    MOVED,
    POSENC,
    attend_by_logits,
    logits_of,
    note,
)
from posenc.transformers.stretching.bands import bands_of_query
from posenc.transformers.stretching.frequencies import Frequencies, Of
from posenc.transformers.stretching.positions import (
    Adoption,
    Placement,
    add_companions,
    companions,
    placement_in,
)

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
        lambda grid: bands_of_query(score, grid, begin),
        *("bands of query", begin),
        grid=grid,
        layers=(score,),
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
    scales = (
        isinstance(transform, ScaledQueries) and transform.inner is None
    )  # keys stay as they are
    if isinstance(score, BandedRope):
        return transform is None or scales
    return score is None and transform is not None and not scales


LAYER = "_posenc_layer"
"""Attribute of attention modules: their ``StretchedLayer``."""


@dataclass(eq=False)
class StretchedLayer:
    """The encoding of an attention module.

    Args:
        adoption: of the model it is in.
        encoding: what its queries and keys are encoded by; no parts for none.
        causal: keys after a query are masked.
        features: order of the features in which rotated ones come first; None: as they are.
        source: the model's frequencies; None without a rotation.
        name: type of layers; "" if all are of one.
        keeps_gain: False if a norm after the rotation takes away any gain.
        placement: positions of the present pass.
    """

    adoption: Adoption
    encoding: Encoding
    causal: bool = True
    features: tuple[int, ...] | None = None
    source: Frequencies | None = None
    name: str = ""
    keeps_gain: bool = True
    placement: Placement | None = None
    order: dict[torch.device, Tensor] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"placement": None, "order": {}}

    def place(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Pre-forward hook: keep the positions of the pass."""
        self.placement = placement_in((arguments, options))

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Forward hook: release the positions of the pass."""
        self.placement = None

    def begin(self, of: Of) -> Encoding:
        """The encoding from which an extension begins."""
        rope = self.encoding.query_key
        if self.source is None or not isinstance(rope, Rope):
            return self.encoding
        return self.source.encoding(of, pairing=rope.pairing, head_dim=rope.head_dim)

    def arranged(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H L D"]:
        """Queries or keys with rotated features first."""
        if self.features is None:
            return x
        if x.device not in self.order:
            self.order[x.device] = torch.tensor(self.features, device=x.device)
        return x.index_select(-1, self.order[x.device])

    def past(self, module: nn.Module, key: Float[Tensor, "B G K D"]) -> DynamicLayer | None:
        """The cache's layer whose whole content the keys are; None where a graph is made."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
            return None
        cache, index = self.adoption.cache, getattr(module, "layer_idx", None)
        if cache is None or not isinstance(index, int) or index >= len(cache.layers):
            return None
        held = cache.layers[index]
        return held if type(held) in (DynamicLayer, Growing) and held.keys is key else None

    def grid(self, grid: Grid | None, queries: int, keys: int) -> Grid:
        """The grid at the positions of the present pass.

        Raises:
            ArgumentError: outside a pass of the whole model.
        """
        placement = self.placement or self.adoption.latest
        if placement is None:
            raise ArgumentError(
                "model",
                expected="a pass of the whole model, which knows the positions",
                got="one of a single layer",
                remedy="Call restore(model) first.",
            )
        return placement.grid(grid, queries, keys, causal=self.causal)


def attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B Q H E"], Tensor | None]:
    """Attention of a model that was stretched, as transformers calls it.

    Args:
        module: the layer; one without a ``StretchedLayer`` has no encoding but ``position_bias``.
        attention_mask: as ``accelerate.interface.mask`` makes it, or of all pairs: bool, or added
            to the logits.
        softcap: c of ``c · tanh(logits / c)``.
        s_aux: one more logit for each head, that has no value.

    Returns:
        The output, contiguous, and, if asked for, the weights ``[B, H, Q, K]``.
    """
    layer: StretchedLayer | None = module.__dict__.get(LAYER)
    queries, keys = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    encoding = Encoding() if layer is None else layer.encoding
    grid = placed = grid_behind(attention_mask, queries, keys)
    past = None
    if layer is not None and encoding.parts():
        past = layer.past(module, key) if queries == 1 else None
        query, key = layer.arranged(query), layer.arranged(key)
        placed = layer.grid(grid, queries, keys)
    weights = wants_weights(module, options)
    plain = position_bias is None and not weights
    if plain and grid is not None and placed is not None:
        options_of_call: dict[str, Any] = {"scale": scale, "sinks": s_aux, "softcap": softcap}
        note(module, POSENC, lambda: MOVED)
        output, operands = None, (query, key, value, placed, encoding)
        with nullcontext() if layer is None else entering(layer.adoption.prepared):
            if past is not None and not dropout:
                output = attend_last(*operands, past, **options_of_call)
            if output is None:
                output = attend(*operands, dropout=dropout, **options_of_call)
        return output.transpose(1, 2).contiguous(), None
    visible = written_out(attention_mask)
    if visible is None and queries > 1:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if causal:
            visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
            visible = visible.tril(keys - queries)
    logits = _logits(query, key, placed, encoding, scale, position_bias)
    if visible is not None:
        visible = visible[..., :keys]
    output, shares = attend_by_logits(
        logits, value, visible, dropout=dropout, softcap=softcap, sinks=s_aux
    )
    return output.transpose(1, 2).contiguous(), shares if weights else None


def _logits(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    grid: Grid | None,
    encoding: Encoding,
    scale: float,
    bias: Tensor | None,
) -> Float[Tensor, "B H Q K"]:
    """Logits by their definition."""
    if grid is not None and encoding.query_key is not None:
        query, key = encoding.query_key(query, key, grid)
    score = encoding.score
    if grid is None or score is None or not score.replaces_product:
        return logits_of(query, key, bias, scale)
    logits = score(query, repeat_heads(key, query.shape[1]), grid, scale=scale)
    return logits if bias is None else logits + bias


def inner_attention(
    module: nn.Module,
    function: Callable[..., tuple[Tensor, Tensor | None]],
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    attention_mask: Tensor | None = None,
) -> tuple[Float[Tensor, "B H Q D"], Tensor | None]:
    """Replacement of the attention method of a module that bypasses the attention interface.

    Args:
        module: that rotates by itself.
        function: of the interface.
    """
    dropped = getattr(module, "attn_dropout", None) if module.training else None
    dropout = 0.0 if dropped is None else dropped.p
    output, weights = function(module, query, key, value, attention_mask, dropout=dropout)
    return output.transpose(1, 2), weights


AttentionInterface.register(STRETCHED, attention)
AttentionMaskInterface.register(STRETCHED, mask)
