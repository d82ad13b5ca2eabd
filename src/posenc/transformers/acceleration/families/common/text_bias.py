"""Biases of text models: causal attention with ALiBi, and T5's position bias by bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.encoding import BucketedTerms
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.interface import PositionBias
from posenc.transformers.acceleration.masks import grid_of


def attend_alibi(
    module: Accelerated,
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    bias: Float[Tensor, "b H K"],
    attended: Bool[Tensor, "B K"] | None,
    *,
    dropout: float,
    scale: float,
) -> Float[Tensor, "B Q C"]:
    """Attention of the last Q of K tokens, heads merged.

    Args:
        module: the layer; in evaluation mode nothing is dropped.
        bias: as the model made it: of a query's keys, only differences matter.
        attended: False for padding. A query that sees no key gets the mean of all values, as under
            a mask that adds the lowest number.
    """
    term = BucketedTerms(lambda offset: torch.zeros_like(offset[..., 0].long()), column=bias)
    grid = grid_of(q.shape[2], k.shape[2], attended, causal=True, device=q.device)
    output = module.attend(q, k, v, grid, term, dropout=dropout, scale=scale)
    if attended is not None:
        nonempty = attended.cumsum(1)[:, -q.shape[2] :] > 0
        output = torch.where(nonempty[:, None, :, None], output, v.mean(dim=2, keepdim=True))
    return output.transpose(1, 2).flatten(2)


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
