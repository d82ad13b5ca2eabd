"""SAM: decomposed relative positions over windows and whole images."""

from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention

from posenc.transformers.acceleration.families.common.images import sam_family

ENTRY = sam_family("SAM", SamVisionAttention, SamVisionSdpaAttention)
