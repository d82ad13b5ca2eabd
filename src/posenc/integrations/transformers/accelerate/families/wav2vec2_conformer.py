"""Wav2Vec2-Conformer: Transformer-XL's relative positions."""

from __future__ import annotations

from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerEncoder,
    Wav2Vec2ConformerSelfAttention,
)

from posenc.integrations.transformers.accelerate.config import KEYS
from posenc.integrations.transformers.accelerate.families.common.conformer import (
    ConformerAttention,
    refusal,
)
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily


class Wav2Vec2ConformerAttention(ConformerAttention, Wav2Vec2ConformerSelfAttention):
    """Self-attention of a conformer block."""

    original = Wav2Vec2ConformerSelfAttention


ENTRY = AcceleratedFamily(
    title="Wav2Vec2-Conformer",
    classes={Wav2Vec2ConformerSelfAttention: Wav2Vec2ConformerAttention},
    configured=(Wav2Vec2ConformerEncoder,),
    masks=KEYS,
    refusal=refusal,
)
