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
from posenc.encoding import Encoding, repeat_heads
from posenc.encoding.prepared import entering
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.runtime import is_transformed
from posenc.transformers.acceleration.accelerated import wants_weights
from posenc.transformers.acceleration.dense import attend_by_logits, logits_of
from posenc.transformers.acceleration.growing import Growing
from posenc.transformers.acceleration.interface import mask
from posenc.transformers.acceleration.lazy_mask import grid_behind, written_out
from posenc.transformers.acceleration.routing import MOVED, POSENC, note
from posenc.transformers.acceleration.views import STRETCHED
from posenc.transformers.stretching.decoding import attend_last
from posenc.transformers.stretching.frequencies import Frequencies, Of
from posenc.transformers.stretching.positions import Adoption, Placement, placement_in

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
        note(module, POSENC, MOVED)
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
