"""Wav2Vec2-Conformer: Transformer-XL's relative positions."""

from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerEncoder,
    Wav2Vec2ConformerSelfAttention,
)

from posenc.transformers.acceleration.families.common.conformer import conformer_family

ENTRY = conformer_family(
    "Wav2Vec2-Conformer", Wav2Vec2ConformerSelfAttention, Wav2Vec2ConformerEncoder
)
