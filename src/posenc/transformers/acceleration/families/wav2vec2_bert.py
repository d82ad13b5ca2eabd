"""Wav2Vec2-BERT: a vector for each clipped offset, or Transformer-XL's positions."""

from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    Wav2Vec2BertEncoder,
    Wav2Vec2BertSelfAttention,
)

from posenc.transformers.acceleration.families.common.conformer import conformer_family

ENTRY = conformer_family("Wav2Vec2-BERT", Wav2Vec2BertSelfAttention, Wav2Vec2BertEncoder)
