"""SAM-HQ: decomposed relative positions over windows and whole images."""

from __future__ import annotations

from transformers.models.sam_hq.modeling_sam_hq import (
    SamHQVisionAttention,
    SamHQVisionSdpaAttention,
)

from posenc.integrations.transformers.accelerate.families.common.decomposed import (
    DecomposedAttention,
)
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class SamHQAttention(DecomposedAttention, SamHQVisionAttention):
    """Attention of the image encoder."""

    original = SamHQVisionAttention

    @property
    def weight_dropout(self) -> float:  # type: ignore[override]
        dropout: float = self.dropout
        return dropout


class SamHQSdpaAttention(DecomposedAttention, SamHQVisionSdpaAttention):
    """Attention of the image encoder, without dropout."""

    original = SamHQVisionSdpaAttention


ENTRY = AcceleratedFamily(
    title="SAM-HQ",
    classes={SamHQVisionAttention: SamHQAttention, SamHQVisionSdpaAttention: SamHQSdpaAttention},
    shortest=196,
)
