"""SAM: decomposed relative positions over windows and whole images."""

from __future__ import annotations

from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention

from posenc.integrations.transformers.accelerate.families.common.decomposed import (
    DecomposedAttention,
)
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class SamAttention(DecomposedAttention, SamVisionAttention):
    """Attention of the image encoder."""

    original = SamVisionAttention

    @property
    def weight_dropout(self) -> float:  # type: ignore[override]
        dropout: float = self.dropout
        return dropout


class SamSdpaAttention(DecomposedAttention, SamVisionSdpaAttention):
    """Attention of the image encoder, without dropout."""

    original = SamVisionSdpaAttention


ENTRY = AcceleratedFamily(
    title="SAM",
    classes={SamVisionAttention: SamAttention, SamVisionSdpaAttention: SamSdpaAttention},
    shortest=196,
)
