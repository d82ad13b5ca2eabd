"""T5's position bias, as T5, mT5, UMT5, Switch and LongT5 compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.integrations.transformers.accelerate.accelerated import Accelerated
from posenc.integrations.transformers.accelerate.interface import PositionBias


class T5Bias(Accelerated):
    """Attention that hands its position bias on as a table."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: PositionBias | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        if position_bias is None and not self.has_relative_attention_bias:
            position_bias = PositionBias()
        return super().forward(
            hidden_states, mask, key_value_states, position_bias, *arguments, **options
        )

    def compute_bias(self, *arguments: Any, **options: Any) -> PositionBias:
        def bucket(offset: Offsets) -> BucketIndex:
            index: BucketIndex = self._relative_position_bucket(
                offset[..., 0].long(),
                bidirectional=not self.is_decoder,
                num_buckets=self.relative_attention_num_buckets,
                max_distance=self.relative_attention_max_distance,
            )
            return index

        weight = self.relative_attention_bias.weight
        rows = torch.arange(self.relative_attention_num_buckets, device=weight.device)
        table = self.relative_attention_bias(rows).T  # [H, N]
        terms = BucketedTerms(
            bucket, table=table, max_distance=self.relative_attention_max_distance
        )
        dense: Callable[..., Tensor] = super().compute_bias  # type: ignore[misc]
        return PositionBias((terms,), lambda: dense(*arguments, **options))
