"""T5's position bias, as T5, mT5, UMT5, Switch and LongT5 compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc.encoding import BucketedTerms
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.interface import PositionBias


class T5Bias(Accelerated):
    """Attention that hands its position bias on as a table, and none where it has none."""

    has_relative_attention_bias = property(lambda module: True)
    """Asks ``compute_bias`` in cross-attention too, where transformers writes zeros out."""

    def buckets(self, relative_position: Tensor) -> BucketIndex:
        """Rows of the table by offset."""
        return self._relative_position_bucket(
            relative_position,
            bidirectional=not self.is_decoder,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )

    def compute_bias(
        self, *lengths: Any, device: torch.device | None = None, **options: Any
    ) -> PositionBias:
        if "relative_attention_bias" not in self._modules:
            return PositionBias()

        def bucket(offset: Offsets) -> BucketIndex:
            return self.buckets(offset[..., 0].long())

        if device is None:
            device = self.relative_attention_bias.weight.device
        rows = torch.arange(self.relative_attention_num_buckets, device=device)
        table = self.relative_attention_bias(rows).T  # [H, N]
        terms = BucketedTerms(
            bucket, table=table, max_distance=self.relative_attention_max_distance
        )
        dense: Callable[..., Tensor] = super().compute_bias  # type: ignore[misc]
        return PositionBias((terms,), lambda: dense(*lengths, device=device, **options))
