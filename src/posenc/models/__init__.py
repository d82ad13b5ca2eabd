"""Reference models, one for each place the literature uses positional encodings."""

from posenc.models.decoder import Decoder, DecoderConfig
from posenc.models.generation import Greedy, Sample, generate

__all__ = ["Decoder", "DecoderConfig", "Greedy", "Sample", "generate"]
