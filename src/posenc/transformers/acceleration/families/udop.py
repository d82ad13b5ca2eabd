"""UDOP: a decoder as T5's; in the encoder, biases by order and by boxes, read by distance."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.udop.modeling_udop import (
    RelativePositionBias1D,
    RelativePositionBiasHorizontal,
    RelativePositionBiasVertical,
    UdopAttention,
    UdopStack,
    get_relative_position_bucket,
)

from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.families.common.page import read_by_distance
from posenc.transformers.acceleration.families.common.text_bias import T5Bias
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.trials import padded_mask, random_ids


class BiasByDistance(Accelerated):
    """A bias that reads each distance up to the farthest, instead of a bucket for each pair."""

    def forward(
        self, attention_mask: Tensor | None = None, bbox: Float[Tensor, "B L 4"] | None = None
    ) -> Float[Tensor, "b H L L"]:
        if self.prefix_bucket:
            return self.original_forward(attention_mask=attention_mask, bbox=bbox)
        offsets, farthest = self.prepare_input(attention_mask, bbox), self.max_distance
        bucket = get_relative_position_bucket(
            torch.arange(-farthest, farthest + 1, device=offsets.device),
            bidirectional=self.bidirectional,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=farthest,
        )
        lines = self.relative_attention_bias(bucket).T  # [H, 2 farthest + 1]
        return read_by_distance(lines, offsets)


def _inputs(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(0)
    ids = random_ids(config.vocab_size, (rows, length), generator)
    corners = 0.5 * torch.rand(rows, length, 2, generator=generator)
    boxes = torch.cat([corners, 2 * corners], dim=-1)
    made = {"input_ids": ids, "attention_mask": padded_mask(ids), "bbox": boxes}
    return made | ({"decoder_input_ids": ids[:, :9]} if hasattr(model, "decoder") else {})


ENTRY = AcceleratedFamily(
    title="UDOP",
    classes={
        UdopAttention: T5Bias,  # of whose encoder the layers are handed the bias of all pairs
        RelativePositionBias1D: BiasByDistance,
        RelativePositionBiasHorizontal: BiasByDistance,
        RelativePositionBiasVertical: BiasByDistance,
    },
    configured=(UdopStack,),
    inputs=_inputs,
    limits="with the encoder's bias written once for all layers",
)
