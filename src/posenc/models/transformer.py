"""Encoder–decoder Transformer with any encoding for each of its three attentions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Length
from posenc.attention import Cache, Context
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models import stack
from posenc.models.block import (
    Activation,
    Norm,
    SourceContext,
    TokenEmbedding,
    normalize,
    tied_logits,
)
from posenc.models.checkpoint import SavedModel
from posenc.models.stack import StackConfig, share_encodings


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(StackConfig):
    """Configuration of a ``Transformer``.

    Args:
        source_vocabulary, target_vocabulary: numbers of token ids.
        encoder_layers, decoder_layers: numbers of blocks.
        encoder_encoding, decoder_encoding: names in the registry, or several joined by ``+``.
        cross_encoding: of cross-attention, applied to the offset from target to source position;
            it must have no embedding part.
        encoder_options, decoder_options, cross_options: the encodings' options.
        shared: use one embedding for source and target.
        tied: use the transposed target embedding as output layer.
        output_scale: factor of the output layer's input (T5: C^-1/2 if tied).

    The others are those of ``StackConfig``; feed-forward, norm and biases are as in Vaswani et
    al. 2017 by default, but pre-norm (the paper has ``norm_first=False``).
    """

    activation: Activation = "relu"
    norm: Norm = "layer"
    bias: bool = True
    source_vocabulary: Length
    target_vocabulary: Length
    encoder_layers: Count
    decoder_layers: Count
    encoder_encoding: str = "sinusoidal"
    decoder_encoding: str = "sinusoidal"
    cross_encoding: str = "nope"
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    cross_options: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    tied: bool = True
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and self.source_vocabulary != self.target_vocabulary:
            raise ArgumentError(
                "shared",
                expected="one vocabulary for source and target",
                got=f"{self.source_vocabulary} and {self.target_vocabulary} ids",
                remedy="Use shared=False, or one vocabulary for both.",
            )


class Transformer(SavedModel[TransformerConfig]):
    """Encoder of source tokens and causal decoder with cross-attention to it.

    Args:
        config: its shape.
        encoder_encodings, decoder_encodings, cross_encodings: one encoding per layer, instead of
            those named by ``config``. Such a model cannot be saved.

    Raises:
        ArgumentError: if dimensions do not fit, an encoding of encoder or cross-attention requires
            a causal mask, or one of cross-attention has an embedding part.

    >>> import torch
    >>> from posenc.models import Transformer, TransformerConfig, generate
    >>> config = TransformerConfig(
    ...     source_vocabulary=9, target_vocabulary=9, dim=32, heads=4, encoder_layers=1,
    ...     decoder_layers=1)
    >>> model = Transformer(config).eval()
    >>> source, begin = torch.randint(9, (2, 7)), torch.zeros(2, 1, dtype=torch.int64)
    >>> generate(model.given(source), begin, max_new_tokens=5).shape
    torch.Size([2, 6])
    """

    kind, made_from = "transformer", TransformerConfig

    def __init__(
        self,
        config: TransformerConfig,
        *,
        encoder_encodings: Sequence[Encoding] | None = None,
        decoder_encodings: Sequence[Encoding] | None = None,
        cross_encodings: Sequence[Encoding] | None = None,
    ) -> None:
        records_by_site = (encoder_encodings, decoder_encodings, cross_encodings)
        super().__init__(config, named=all(records is None for records in records_by_site))
        encoder, decoder, cross = (
            stack.make_encodings(
                config,
                getattr(config, f"{site}_encoding"),
                getattr(config, f"{site}_options"),
                records,
                layers=config.encoder_layers if site == "encoder" else config.decoder_layers,
                causal=site == "decoder",
                field=f"{site}_encoding",
            )
            for site, records in zip(("encoder", "decoder", "cross"), records_by_site, strict=True)
        )
        self.source_embedding = TokenEmbedding(config.source_vocabulary, config.dim)
        self.target_embedding = self.source_embedding
        if not config.shared:
            self.target_embedding = TokenEmbedding(config.target_vocabulary, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = stack.make_blocks(config, encoder, causal=False)
        self.decoder = stack.make_blocks(config, decoder, causal=True, cross=cross)
        self.shared_encodings = share_encodings(self)
        # output of post-norm blocks is normalised already
        self.encoder_norm, self.decoder_norm = (
            stack.norm(config) if config.norm_first else None for _ in range(2)
        )
        vocabulary = config.target_vocabulary
        self.output = None if config.tied else nn.Linear(config.dim, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights except the encodings'; see ``Blocks``."""
        stack.draw_embedding(self.source_embedding)
        if not self.config.shared:
            stack.draw_embedding(self.target_embedding)
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=self.config.dim**-0.5)

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        source_layout: Layout | None = None,
        target_layout: Layout | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the target's next token at every place, ``[B, T, target_vocabulary]``.

        Args:
            source: ``[B, S]`` ids.
            target: ``[B, T]`` ids, starting with a begin token.
            source_layout, target_layout: positions and padding; 0, 1, 2, … by default.

        Raises:
            ArgumentError: for tokens of another rank or dtype.
        """
        return self.given(source, source_layout)(target, target_layout)

    def encode(
        self, source: Int[Tensor, "B S"], layout: Layout | None = None
    ) -> Float[Tensor, "B S C"]:
        """The encoder's vectors of a source.

        Raises:
            ArgumentError: for tokens of another rank or dtype.
        """
        layout = stack.token_layout("source", source, layout)
        x = self.source_embedding(source) * self.config.embedding_factor
        x = self.encoder(self.dropout(self.encoder.embed(x, layout, source)), layout)
        return x if self.encoder_norm is None else normalize(self.encoder_norm, x, layout)

    def given(self, source: Int[Tensor, "B S"], layout: Layout | None = None) -> Given:
        """The decoder conditioned on this source, as ``encode``: a model for ``generate``."""
        layout = stack.token_layout("source", source, layout)
        encoded = self.encode(source, layout)
        return Given(self, [SourceContext(encoded, layout) for _ in self.decoder])

    def decode(
        self,
        target: Int[Tensor, "B T"],
        layout: Layout | None,
        contexts: Sequence[Context | SourceContext],
        *,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token, given the context of each block's cross-attention."""
        past = None if cache is None else cache[0]
        layout = stack.token_layout("target", target, layout, past)
        x = self.target_embedding(target) * self.config.embedding_factor
        x = self.dropout(self.decoder.embed(x, layout, target, past))
        x = self.decoder(x, layout, cache=cache, contexts=contexts)
        if self.decoder_norm is not None:
            x = normalize(self.decoder_norm, x, layout)
        x = x * self.config.output_scale
        if self.output is None:
            return tied_logits(self.target_embedding, x, self.config.target_vocabulary)
        logits: Tensor = self.output(x)
        return logits


class Given:
    """A ``Transformer``'s decoder conditioned on a source: a language model of targets.

    The source is encoded once and, without gradients, projected once.

    Args:
        contexts: of each block's cross-attention.
    """

    def __init__(self, model: Transformer, contexts: Sequence[SourceContext]) -> None:
        self.model, self.contexts = model, contexts

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        layout: Layout | None = None,
        *,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token at every position; as ``Decoder``."""
        return self.model.decode(tokens, layout, self.contexts, cache=cache)

    def new_cache(self) -> Cache:
        """An empty cache."""
        return Cache(len(self.contexts))

    def select(self, rows: Int[Tensor, " rows"]) -> Given:
        """The decoder conditioned on the given source rows, possibly repeated."""
        return Given(self.model, [context.select(rows) for context in self.contexts])
