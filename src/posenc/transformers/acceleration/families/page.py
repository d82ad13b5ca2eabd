"""Attention to tokens on a page, as LayoutLM computes it: biases by order and by box.

Boxes are at any places, so that offsets do not repeat from row to row: the bias of all pairs is
written once for all layers, with the mask in it, and PyTorch's fused kernel reads it. It is read by
distance, up to the one from which on all are in one bucket, instead of bucket by pair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.layoutlmv2 import modeling_layoutlmv2
from transformers.models.layoutlmv3 import modeling_layoutlmv3
from transformers.models.udop import modeling_udop

from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import (
    Accelerated,
    AcceleratedFamily,
    wants_weights,
)
from posenc.transformers.acceleration.families.buckets import T5Bias
from posenc.transformers.acceleration.masks import added_mask
from posenc.transformers.acceleration.routing import dense_attention
from posenc.transformers.acceleration.trials import fitting_length, padded_mask, random_ids

BIASES = ("rel_pos", "rel_2d_pos", "position_bias")
"""Arguments that are biases: one of each kind, or their sum in LayoutLMv3 of newer versions."""


class PageMask:
    """A mask that layers hand on, to which the first of them adds the biases.

    Args:
        mask: the model's.
        device: of the first layers.
    """

    def __init__(self, mask: Tensor | None, device: torch.device) -> None:
        self.mask = mask
        self._summed: tuple[Tensor | None] | None = None
        self._by_device = {device: self}

    def to(self, device: torch.device | str | int, **options: Any) -> PageMask:
        """The page of another device, the same one for all layers there."""
        device = torch.device(device)
        if device not in self._by_device:
            mask = None if self.mask is None else self.mask.to(device)
            self._by_device[device] = PageMask(mask, device)
        return self._by_device[device]

    def summed(self, add: Callable[[Tensor | None], Tensor | None]) -> Tensor | None:
        """The mask with biases, ``[b, h, #Q, K]`` as it is added to the logits."""
        if self._summed is None:
            self._summed = (add(self.mask),)
        return self._summed[0]


class PageAttention(Accelerated):
    """Attention whose mask is a ``PageMask``; with any other, it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | PageMask | None = None,
        **options: Any,
    ) -> Any:
        if not isinstance(attention_mask, PageMask):
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=attention_mask, **options
            )
        biases = [options[name] for name in BIASES if options.get(name) is not None]
        size = (*hidden_states.shape[:2], self.num_attention_heads, -1)
        q, k, v = (x.view(size).transpose(1, 2) for x in self.projected(hidden_states))
        dropout = self.dropout.p if self.training else 0.0
        bias = attention_mask.summed(lambda mask: self.summed(biases, mask))
        scale = self.attention_head_size**-0.5
        written = dropout > 0 or wants_weights(self, options)  # no dropout in the kernel
        output, weights = dense_attention(
            q, k, v, bias, None, dropout=dropout, scale=scale, with_weights=written
        )
        return output.transpose(1, 2).flatten(2), weights

    @abstractmethod
    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[B, L, C]`` each."""

    @abstractmethod
    def summed(self, biases: Sequence[Tensor], mask: Tensor | None) -> Tensor | None:
        """Sum of biases and mask, to add to the logits; None without either."""


class PageEncoder(Accelerated):
    """The encoder, which reads biases by distance."""

    relative_position_bucket: Callable[..., Tensor]

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        mask: Tensor | PageMask | None = attention_mask
        if hidden_states.shape[1] >= self.shortest:
            mask = PageMask(added_mask(attention_mask, hidden_states), hidden_states.device)
        return self.original_forward(hidden_states=hidden_states, attention_mask=mask, **options)

    def bias_by_order(self, position_ids: Int[Tensor, "B L"]) -> Float[Tensor, "b H L L"]:
        """The bias by the tokens' order."""
        return self._read(self.rel_pos_bias, position_ids, self.rel_pos_bins, self.max_rel_pos)

    def bias_by_boxes(self, bbox: Int[Tensor, "B L 4"]) -> Float[Tensor, "b H L L"]:
        """The bias by the corners of boxes."""
        sizes = self.rel_2d_pos_bins, self.max_rel_2d_pos
        across = self._read(self.rel_pos_x_bias, bbox[..., 0], *sizes)
        return across + self._read(self.rel_pos_y_bias, bbox[..., 3], *sizes)

    @torch.no_grad()  # as transformers does: these biases are not trained
    def _read(
        self, bias: nn.Linear, positions: Int[Tensor, "B L"], bins: int, farthest: int
    ) -> Float[Tensor, "b H L L"]:
        """The bias of all pairs; of one row where all rows have the same positions."""
        if has_values(positions) and torch.equal(positions, positions[:1].expand_as(positions)):
            positions = positions[:1]
        reach = torch.arange(-farthest, farthest + 1, device=positions.device)
        bucket = self.relative_position_bucket(reach, num_buckets=bins, max_distance=farthest)
        lines = bias.weight[:, bucket]  # [H, 2 farthest + 1]
        return read_by_distance(lines, positions.unsqueeze(1) - positions.unsqueeze(2))


def read_by_distance(
    lines: Float[Tensor, "H W"], offsets: Int[Tensor, "b Q K"]
) -> Float[Tensor, "b H Q K"]:
    """A number for each pair from those of the offsets ``-(W - 1) / 2`` … ``(W - 1) / 2``.

    Offsets beyond read the last ones.
    """
    farthest = lines.shape[1] // 2
    index = offsets.clamp(-farthest, farthest) + farthest
    pairs = lines.index_select(1, index.flatten())
    return pairs.view(len(lines), *offsets.shape).transpose(0, 1)


def page(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Random ids with boxes, some of them padding."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    size = (rows, fitting_length(model, config, length))
    most = config.max_2d_position_embeddings // 2
    corners = torch.randint(most, (*size, 2), generator=generator)
    ids = torch.randint(config.vocab_size, size, generator=generator)
    boxes = torch.cat([corners, 2 * corners], dim=-1)
    return {"input_ids": ids, "bbox": boxes, "attention_mask": padded_mask(ids)}


class LayoutLMv2Attention(PageAttention):
    """LayoutLMv2's attention, whose masks are not 0 where a key is hidden."""

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.compute_qkv(hidden_states)

    def summed(self, biases: Sequence[Tensor], mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return sum(biases[1:], biases[0]) if biases else None
        bias = sum(biases, torch.zeros_like(mask))
        return bias.masked_fill(mask.bool(), torch.finfo(bias.dtype).min)


class LayoutLMv2Encoding(PageEncoder):
    """LayoutLMv2's encoder."""

    relative_position_bucket = staticmethod(modeling_layoutlmv2.relative_position_bucket)
    _calculate_1d_position_embeddings = PageEncoder.bias_by_order
    _calculate_2d_position_embeddings = PageEncoder.bias_by_boxes


def layoutlmv2() -> AcceleratedFamily:
    """LayoutLMv2 and LayoutXLM: T5's buckets by order, and by the corners of boxes on each axis."""

    def inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
        image = torch.randn(rows, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        return page(model, rows, length) | {"image": image}

    return AcceleratedFamily(
        title="LayoutLMv2",
        classes={
            modeling_layoutlmv2.LayoutLMv2SelfAttention: LayoutLMv2Attention,
            modeling_layoutlmv2.LayoutLMv2Encoder: LayoutLMv2Encoding,
        },
        shortest=128,
        inputs=inputs,
        limits="with the bias written once for all layers",
    )


class LayoutLMv3Attention(PageAttention):
    """LayoutLMv3's attention. The factor of its "CogView" softmax cancels out."""

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)

    def summed(self, biases: Sequence[Tensor], mask: Tensor | None) -> Tensor | None:
        if not biases:
            return mask
        bias: Tensor = sum(biases[1:], biases[0])
        if "position_bias" not in self.parameters_of_forward:  # which is scaled already
            bias = bias * self.attention_head_size**-0.5
        return bias if mask is None else bias + mask


class LayoutLMv3Encoding(PageEncoder):
    """LayoutLMv3's encoder."""

    # Newer versions read by distance themselves.
    if not hasattr(modeling_layoutlmv3.LayoutLMv3Encoder, "_relative_position_lookup"):
        _cal_1d_pos_emb = PageEncoder.bias_by_order
        _cal_2d_pos_emb = PageEncoder.bias_by_boxes


def layoutlmv3() -> AcceleratedFamily:
    """LayoutLMv3, as LayoutLMv2."""

    def inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
        config, made = model.config, page(model, rows, length)
        if config.visual_embed:
            size = (rows, config.num_channels, config.input_size, config.input_size)
            made["pixel_values"] = torch.randn(size, generator=torch.Generator().manual_seed(0))
        return made

    return AcceleratedFamily(
        title="LayoutLMv3",
        classes={
            modeling_layoutlmv3.LayoutLMv3SelfAttention: LayoutLMv3Attention,
            modeling_layoutlmv3.LayoutLMv3Encoder: LayoutLMv3Encoding,
        },
        shortest=128,
        inputs=inputs,
        limits="with the bias written once for all layers",
    )


class BiasByDistance(Accelerated):
    """A bias that reads each distance up to the farthest, instead of a bucket for each pair."""

    def forward(
        self, attention_mask: Tensor | None = None, bbox: Float[Tensor, "B L 4"] | None = None
    ) -> Float[Tensor, "b H L L"]:
        if self.prefix_bucket:
            return self.original_forward(attention_mask=attention_mask, bbox=bbox)
        offsets, farthest = self.prepare_input(attention_mask, bbox), self.max_distance
        bucket = modeling_udop.get_relative_position_bucket(
            torch.arange(-farthest, farthest + 1, device=offsets.device),
            bidirectional=self.bidirectional,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=farthest,
        )
        lines = self.relative_attention_bias(bucket).T  # [H, 2 farthest + 1]
        return read_by_distance(lines, offsets)


def udop() -> AcceleratedFamily:
    """UDOP: a decoder as T5's; in the encoder, biases by order and by boxes, read by distance."""

    def inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
        config, generator = model.config, torch.Generator().manual_seed(0)
        ids = random_ids(config.vocab_size, (rows, length), generator)
        corners = 0.5 * torch.rand(rows, length, 2, generator=generator)
        boxes = torch.cat([corners, 2 * corners], dim=-1)
        made = {"input_ids": ids, "attention_mask": padded_mask(ids), "bbox": boxes}
        return made | ({"decoder_input_ids": ids[:, :9]} if hasattr(model, "decoder") else {})

    return AcceleratedFamily(
        title="UDOP",
        classes={
            modeling_udop.UdopAttention: T5Bias,  # the encoder's are handed the bias of all pairs
            modeling_udop.RelativePositionBias1D: BiasByDistance,
            modeling_udop.RelativePositionBiasHorizontal: BiasByDistance,
            modeling_udop.RelativePositionBiasVertical: BiasByDistance,
        },
        configured=(modeling_udop.UdopStack,),
        inputs=inputs,
        limits="with the encoder's bias written once for all layers",
    )
