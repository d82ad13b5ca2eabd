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

from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import Accelerated, wants_weights
from posenc.transformers.acceleration.masks import added_mask
from posenc.transformers.acceleration.routing import dense_attention
from posenc.transformers.acceleration.trials import fitting_length, padded_mask

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

    def masked(
        self, mask: Tensor | None, hidden_states: Float[Tensor, "B L C"]
    ) -> Tensor | PageMask | None:
        """The mask that layers get."""
        short = hidden_states.shape[1] < self.shortest
        return mask if short else PageMask(added_mask(mask, hidden_states), hidden_states.device)

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
