"""SAM-HQ: decomposed relative positions over windows and whole images."""

from transformers.models.sam_hq.modeling_sam_hq import (
    SamHQVisionAttention,
    SamHQVisionSdpaAttention,
)

from posenc.transformers.acceleration.families.common.images import sam_family

ENTRY = sam_family("SAM-HQ", SamHQVisionAttention, SamHQVisionSdpaAttention)
