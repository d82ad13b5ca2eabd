"""Inkling: profiles of a bias by distance, mixed by each query, in full and sliding layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.models.inkling.modeling_inkling import (
    InklingAttention,
    InklingModel,
    InklingRelativeLogits,
    InklingTextModel,
)

from posenc.encoding import TokenTableProduct
from posenc.encodings.common.buckets import gather_rows
from posenc.transformers.acceleration.accelerated import Accelerated, AcceleratedFamily
from posenc.transformers.acceleration.interface import PositionBias, mask
from posenc.transformers.acceleration.terms import products_by_offset


@dataclass(eq=False)
class FactoredRelativeLogits(PositionBias):
    """Relative logits in structured form, with what a layer does to the tensor of all pairs."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the projected tokens."""
        return self._product.tokens.dtype

    @property
    def _product(self) -> TokenTableProduct:
        (term,) = self.terms
        assert term.left is not None
        return term.left

    def float(self) -> FactoredRelativeLogits:
        """Returns itself: ``*`` computes in float32."""
        return self

    def __mul__(self, factor: Float[Tensor, "1 1 Q 1"]) -> FactoredRelativeLogits:
        (term,), product, dtype = self.terms, self._product, self.dtype
        tokens = (product.tokens.float() * factor).to(dtype)
        scaled = replace(term, left=replace(product, tokens=tokens))
        return FactoredRelativeLogits((scaled,), lambda: (self.dense.float() * factor).to(dtype))

    def to(self, device: Any, **options: Any) -> FactoredRelativeLogits:
        return self if isinstance(device, torch.dtype) else super().to(device)


class AcceleratedRelativeLogits(Accelerated, InklingRelativeLogits):
    """Relative logits that are handed to attention as their two factors."""

    def forward(
        self,
        relative_states: Float[Tensor, "B Q H E"],
        query_positions: Int[Tensor, " Q"],
        key_positions: Int[Tensor, " K"],
    ) -> Float[Tensor, "B H Q K"] | FactoredRelativeLogits:
        # A tensor for one query is as small as its factors.
        if len(query_positions) == 1 or len(key_positions) < self.shortest:
            return self.original_forward(
                relative_states=relative_states,
                query_positions=query_positions,
                key_positions=key_positions,
            )
        tokens = relative_states.transpose(1, 2)
        # By offsets from -extent to 1, of which the first and the last have no bias.
        rows = pad(self.proj.T.flip(0), (0, 0, 1, 1)).unsqueeze(0)  # [1, N, E]
        term = products_by_offset(tokens, rows, self.rel_extent)

        def dense() -> Tensor:
            offsets = key_positions - query_positions.unsqueeze(1)
            return gather_rows(tokens, rows, term.bucket(offsets[None, ..., None]))

        return FactoredRelativeLogits((term,), dense)


class AcceleratedInklingAttention(Accelerated, InklingAttention):
    """Attention through the interface, with a mask where PyTorch's kernel needs none."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Q C"],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None:  # causal; windows reach beyond all keys
            batch, queries = hidden_states.shape[:2]
            sizes: tuple[Any, Any] = (queries, 0)
            first: int | Tensor = 0
            if cache is not None:
                sizes = cache.get_mask_sizes(queries, self.layer_idx)
                first = cache.get_query_offset(self.layer_idx)
            device = hidden_states.device
            attention_mask = mask(batch, queries, sizes[0], first, sizes[1], device=device)
        inputs = {"hidden_states": hidden_states, "attention_mask": attention_mask}
        return self.original_forward(cache=cache, **inputs, **options)


ENTRY = AcceleratedFamily(
    title="Inkling",
    classes={
        InklingAttention: AcceleratedInklingAttention,
        InklingRelativeLogits: AcceleratedRelativeLogits,
    },
    configured=(InklingModel, InklingTextModel),
)
