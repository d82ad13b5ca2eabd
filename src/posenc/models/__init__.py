"""Reference models for language, images, translation and classification."""

from posenc.models.checkpoint import MODELS, SavedModel, load
from posenc.models.complex import ClassifierConfig, SequenceClassifier
from posenc.models.decoder import Decoder, DecoderConfig, in_segments
from posenc.models.encoder import (
    Deberta,
    DebertaConfig,
    Encoder,
    EncoderConfig,
    MaskedLM,
    TextClassifier,
)
from posenc.models.generation import Beams, Greedy, Sample, beam_search, generate
from posenc.models.swin import Swin, SwinConfig
from posenc.models.transformer import Transformer, TransformerConfig
from posenc.models.vision import (
    DetrConfig,
    ImageConfig,
    ImageEncoder,
    VisionTransformer,
    pad_images,
)

__all__ = [
    "MODELS",
    "Beams",
    "ClassifierConfig",
    "Deberta",
    "DebertaConfig",
    "Decoder",
    "DecoderConfig",
    "DetrConfig",
    "Encoder",
    "EncoderConfig",
    "Greedy",
    "ImageConfig",
    "ImageEncoder",
    "MaskedLM",
    "Sample",
    "SavedModel",
    "SequenceClassifier",
    "Swin",
    "SwinConfig",
    "TextClassifier",
    "Transformer",
    "TransformerConfig",
    "VisionTransformer",
    "beam_search",
    "generate",
    "in_segments",
    "load",
    "pad_images",
]
