"""BERT-style encoder, masked language models (DeBERTa's, too) and text classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Interval, Length, Natural, check
from posenc.encoding import Encoding
from posenc.encoding.tensors import Features, TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models import stack
from posenc.models.block import Activation, Norm, TokenEmbedding, normalize, tied_logits
from posenc.models.checkpoint import SavedModel
from posenc.models.stack import LayersConfig, make_encodings, share_encodings, token_layout
from posenc.models.vision import mean_of_real


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(LayersConfig):
    """Configuration of an ``Encoder``.

    Args:
        vocabulary: number of token ids.
        types: number of segment ids (BERT: 2); 0: none.
        embedding_norm: add a norm after the embedding if the blocks are post-norm.
        classes: number of labels of a ``TextClassifier``.

    The others are those of ``LayersConfig``, by default as in Devlin et al. 2019: post-norm.
    """

    activation: Activation = "gelu"
    norm: Norm = "layer"
    norm_first: bool = False
    bias: bool = True
    vocabulary: Length
    encoding: str = "learned"
    types: Natural = 0
    embedding_norm: bool = True
    classes: Annotated[int, Interval(2, 2**16)] | None = None


class Encoder(SavedModel[EncoderConfig]):
    """Embeddings, bidirectional blocks and a norm.

    The norm precedes the blocks if they are post-norm (BERT), and follows them if pre-norm.

    Args:
        config: its shape.
        encodings: one encoding per layer, instead of those named by ``config.encoding``.

    Raises:
        ArgumentError: if dimensions do not fit, there is not one encoding per layer, or one
            requires a causal mask.

    >>> import torch
    >>> from posenc.models import Encoder, EncoderConfig
    >>> config = EncoderConfig(vocabulary=99, dim=32, layers=2, heads=4, encoding="t5")
    >>> Encoder(config)(torch.randint(99, (1, 10))).shape
    torch.Size([1, 10, 32])
    """

    kind, made_from = "encoder", EncoderConfig

    def __init__(
        self, config: EncoderConfig, *, encodings: Sequence[Encoding] | None = None
    ) -> None:
        super().__init__(config, named=encodings is None)
        encodings = stack.make_encodings(
            config, config.encoding, config.options, encodings, layers=config.layers, causal=False
        )
        self.embedding = TokenEmbedding(config.vocabulary, config.dim)
        self.types = nn.Embedding(config.types, config.dim) if config.types else None
        self.norm = stack.norm(config) if config.norm_first or config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = stack.make_blocks(config, encodings, causal=False)
        self.shared_encodings = share_encodings(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights except the encodings'; see ``Blocks``."""
        stack.draw_embedding(self.embedding)
        if self.types is not None:
            stack.draw_embedding(self.types)
        self.blocks.reset_parameters()

    def forward(
        self, tokens: TokenIds, layout: Layout | None = None, *, types: TokenIds | None = None
    ) -> Features:
        """Token vectors after the last block, ``[B, L, C]``.

        Args:
            tokens: ``[B, L]`` ids.
            layout: positions and padding; 0, 1, 2, … by default.
            types: ``[B, L]`` segment ids; 0 by default.

        Raises:
            ArgumentError: for tokens of another rank or dtype, or types that the model lacks.
        """
        layout = stack.token_layout("tokens", tokens, layout)
        x = self.blocks(self.embed(tokens, layout, types=types), layout)
        return self.finish(x, layout)

    def embed(self, tokens: TokenIds, layout: Layout, *, types: Tensor | None = None) -> Features:
        """Input of the first block.

        Raises:
            ArgumentError: for types that the model lacks.
        """
        x = self.embedding(tokens) * self.config.embedding_factor
        if self.types is not None:
            kinds = torch.zeros_like(tokens) if types is None else types
            x = x + self.types(kinds) * self.config.embedding_factor
        elif types is not None:
            raise ArgumentError(
                "types", expected="none, as config.types is 0", got="some", remedy="Omit types."
            )
        x = self.blocks.embed(x, layout, tokens)
        if self.norm is not None and not self.config.norm_first:
            x = normalize(self.norm, x, layout)
        embedded: Tensor = self.dropout(x)
        return embedded

    def finish(self, x: Features, layout: Layout) -> Features:
        """Output of the last block, normalised if the blocks are pre-norm."""
        if self.norm is None or not self.config.norm_first:
            return x
        return normalize(self.norm, x, layout)


class MaskedLMHead(nn.Module):
    """``E · norm(gelu(W x + b)) + c``, E the token embedding (Devlin et al. 2019).

    Args:
        config: of the encoder.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps or 1e-5)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        nn.init.normal_(self.dense.weight, std=self.dense.in_features**-0.5)
        nn.init.zeros_(self.dense.bias)
        nn.init.zeros_(self.bias)
        self.norm.reset_parameters()

    def forward(
        self, x: Float[Tensor, "*places C"], embedding: nn.Module
    ) -> Float[Tensor, "*places V"]:
        """Logits at each position, from the encoder's vectors and embedding."""
        x = self.norm(nn.functional.gelu(self.dense(x)))
        return tied_logits(embedding, x, len(self.bias)) + self.bias


class MaskedLM(SavedModel[EncoderConfig]):
    """An ``Encoder`` with a head that predicts masked tokens.

    Args:
        config: of the encoder.
        encodings: see ``Encoder``.

    Raises:
        ArgumentError: as ``Encoder``.

    >>> import torch
    >>> from posenc.models import EncoderConfig, MaskedLM
    >>> MaskedLM(EncoderConfig(vocabulary=99, dim=32, layers=2, heads=4, encoding="rope"))(
    ...     torch.randint(99, (1, 10))).shape
    torch.Size([1, 10, 99])
    """

    kind, made_from = "masked_lm", EncoderConfig

    def __init__(
        self, config: EncoderConfig, *, encodings: Sequence[Encoding] | None = None
    ) -> None:
        super().__init__(config)
        self.encoder = Encoder(config, encodings=encodings)
        self.head = MaskedLMHead(config)

    def forward(
        self, tokens: TokenIds, layout: Layout | None = None, *, types: TokenIds | None = None
    ) -> Float[Tensor, "B L V"]:
        """Logits of the token at each position, ``[B, L, vocabulary]``; as ``Encoder``."""
        x = self.encoder(tokens, layout, types=types)
        logits: Tensor = self.head(x, self.encoder.embedding)
        return logits


class TextClassifier(SavedModel[EncoderConfig]):
    """``W · mean(encoder(tokens)) + b``, the mean over valid tokens.

    Args:
        config: of the encoder, with ``classes``.

    Raises:
        ArgumentError: as ``Encoder``, or without ``classes``.

    >>> import torch
    >>> from posenc.models import EncoderConfig, TextClassifier
    >>> sizes = {"vocabulary": 99, "dim": 32, "layers": 2, "heads": 4}
    >>> config = EncoderConfig(encoding="rope", classes=3, **sizes)
    >>> TextClassifier(config)(torch.randint(99, (2, 10))).shape
    torch.Size([2, 3])
    """

    kind, made_from = "text_classifier", EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.output = nn.Linear(config.dim, check("classes", Count, config.classes))
        nn.init.normal_(self.output.weight, std=config.dim**-0.5)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: TokenIds, layout: Layout | None = None) -> Float[Tensor, "B classes"]:
        """Logits of the classes, ``[B, classes]``; as ``Encoder``."""
        layout = token_layout("tokens", tokens, layout)
        logits: Tensor = self.output(mean_of_real(self.encoder(tokens, layout), layout))
        return logits


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


class Deberta(SavedModel[DebertaConfig]):
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
        super().__init__(config)
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
