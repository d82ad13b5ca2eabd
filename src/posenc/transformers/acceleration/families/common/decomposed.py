"""Attention of images with decomposed relative positions, as SAM and ViTDet compute it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.transformers.acceleration.accelerated import Accelerated, wants_weights
from posenc.transformers.acceleration.family import AcceleratedFamily


class DecomposedAttention(Accelerated):
    """Attention among the cells of an image or of a window."""

    weight_dropout: float = 0.0
    """Probability with which a weight is dropped in training."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Y X C"],
        output_attentions: bool | None = False,
        **options: Any,
    ) -> Any:
        height, width = hidden_states.shape[1:3]
        short = height * width < self.shortest
        if short or wants_weights(self, {"output_attentions": output_attentions}):
            inputs = {"hidden_states": hidden_states, "output_attentions": output_attentions}
            return self.original_forward(**inputs, **options)
        heads = self.num_attention_heads
        qkv = self.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, L, D] each
        terms = []
        if self.use_rel_pos:
            tables = (height, self.rel_pos_h), (width, self.rel_pos_w)
            terms = [self._along(axis, q, *table) for axis, table in enumerate(tables)]
        cells = Layout.image(height, width, device=q.device)
        output = self.attend(q, k, v, Grid(cells, cells), *terms, dropout=self.weight_dropout)
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:3], -1)
        return self.proj(output), None

    def _along(self, axis: int, q: Tensor, size: int, table: Tensor) -> BucketedTerms:
        """Products of unscaled queries with a row for each offset along an axis."""
        pairs = self.get_rel_pos(size, size, table)  # by query and key
        rows = torch.cat([pairs[0].flip(0), pairs[1:, 0]]).unsqueeze(0)  # [1, 2 size - 1, D]
        left = TokenTableProduct(q, rows)
        return BucketedTerms(partial(_bucket, axis=axis, size=size), left=left)


class WithDropout(DecomposedAttention):
    """Attention that drops weights by its own rate."""

    @property
    def weight_dropout(self) -> float:  # type: ignore[override]
        return self.dropout


def sam_family(title: str, eager: type[nn.Module], sdpa: type[nn.Module]) -> AcceleratedFamily:
    """The family of SAM's two classes of attention, of which the second drops nothing."""
    return AcceleratedFamily(title, {eager: WithDropout, sdpa: DecomposedAttention}, shortest=196)


def _bucket(offset: Offsets, *, axis: int, size: int) -> BucketIndex:
    return (size - 1 - offset[..., axis].long()).clamp(0, 2 * size - 2)
