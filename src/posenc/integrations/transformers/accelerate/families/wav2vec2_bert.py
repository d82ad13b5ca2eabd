"""Wav2Vec2-BERT: a vector for each clipped offset, or Transformer-XL's positions."""

from __future__ import annotations

from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    Wav2Vec2BertEncoder,
    Wav2Vec2BertSelfAttention,
)

from posenc.integrations.transformers.accelerate.config import KEYS
from posenc.integrations.transformers.accelerate.families.common.conformer import (
    ConformerAttention,
    refusal,
)
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class Wav2Vec2BertAttention(ConformerAttention, Wav2Vec2BertSelfAttention):
    """Self-attention of a conformer block."""

    original = Wav2Vec2BertSelfAttention


ENTRY = AcceleratedFamily(
    title="Wav2Vec2-BERT",
    classes={Wav2Vec2BertSelfAttention: Wav2Vec2BertAttention},
    configured=(Wav2Vec2BertEncoder,),
    masks=KEYS,
    refusal=refusal,
)
