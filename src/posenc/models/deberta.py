"""DeBERTa: relative positions in the encoder, absolute positions in the mask decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Count, Interval
from posenc.encoding.tensors import TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models.checkpoint import SavedModel
from posenc.models.encoder import Encoder, EncoderConfig, MaskedLMHead
from posenc.models.stack import make_encodings, token_layout


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(EncoderConfig):
    """Configuration of a ``Deberta``.

    Args:
        layers: number of layers in the fine-tuning form, 2 or more; the last one decodes.
        encoding: of all layers' attention.
        absolute: encoding of absolute positions, added before decoding.
        absolute_options: its options.
        steps: number of applications of the decoding layer.

    The others are those of ``EncoderConfig``.
    """

    layers: Annotated[int, Interval(2, 2**16)]
    encoding: str = "deberta"
    absolute: str = "learned"
    absolute_options: Mapping[str, Any] = field(default_factory=dict)
    steps: Count = 2

    @property
    def encoder(self) -> EncoderConfig:
        """Configuration of the encoder (the fine-tuning form)."""
        return EncoderConfig(**{f.name: getattr(self, f.name) for f in fields(EncoderConfig)})


class Deberta(SavedModel):
    """Masked language model with an Enhanced Mask Decoder.

    With H the vectors after all but the last of the encoder's layers and p absolute positions:
    ``I_0 = H + p``, ``I_{t+1} = layer(queries and residual I_t, keys and values H)``; the last
    ``I`` goes to the masked-LM head. All steps (two in the paper) share one layer.

    Differs from the paper in nothing; ``fine_tuned`` follows the released code.

    Args:
        config: its shape.

    Raises:
        ArgumentError: unless ``absolute`` has an embedding part only, or as ``Encoder``.

    Reference: He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention",
    section 3.2 and appendix.

    >>> import torch
    >>> from posenc.models import Deberta, DebertaConfig
    >>> model = Deberta(DebertaConfig(vocabulary=99, dim=32, layers=3, heads=4, max_length=64))
    >>> model(torch.randint(99, (1, 10))).shape
    torch.Size([1, 10, 99])
    """

    kind, made_from = "deberta", DebertaConfig

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.config = self.require_config(config)
        self.encoder = Encoder(config.encoder)
        (self.absolute,) = make_encodings(
            config,
            config.absolute,
            config.absolute_options,
            layers=1,
            causal=False,
            field="absolute",
        )
        part = self.absolute.embedding
        if part is None or part.every_layer or len(self.absolute.parts()) > 1:
            raise ArgumentError(
                "absolute",
                expected="an encoding with an embedding part only, applied once",
                got=config.absolute,
                remedy="Use 'learned' or 'sinusoidal'.",
            )
        self.head = MaskedLMHead(config)

    def forward(
        self, tokens: TokenIds, layout: Layout | None = None, *, types: TokenIds | None = None
    ) -> Float[Tensor, "B L V"]:
        """Logits of the token at each position, ``[B, L, vocabulary]``; as ``Encoder``."""
        layout = token_layout("tokens", tokens, layout)
        *encoding, decoding = self.encoder.blocks
        hidden = self.encoder.embed(tokens, layout, types=types)
        for block in encoding:
            hidden = block(hidden, layout)
        x = self.absolute.embed(hidden, layout, tokens=tokens)
        for _ in range(self.config.steps):
            x = decoding(x, layout, source=hidden)
        x = self.encoder.finish(x, layout)
        logits: Tensor = self.head(x, self.encoder.embedding)
        return logits

    def fine_tuned(self) -> Encoder:
        """The encoder for fine-tuning: the encoding layers, then the decoding layer once.

        It has no absolute positions (I = H, one step), and shares this model's weights.
        """
        return self.encoder
