"""Decoder language model with any positional encoding, and Transformer-XL's segment recurrence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Length, Natural, check
from posenc.attention import Cache
from posenc.encoding import Encoding
from posenc.encoding.tensors import TokenIds
from posenc.layout import Layout
from posenc.models import stack
from posenc.models.block import TokenEmbedding, normalize, tied_logits
from posenc.models.checkpoint import SavedModel
from posenc.models.stack import LayersConfig, share_encodings


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayersConfig):
    """Configuration of a ``Decoder``.

    Args:
        vocabulary: number of token ids.
        window: attend only to tokens less than this many steps back; None: all. One for all
            layers, or one per layer.
        tied: use the transposed token embedding as output layer.
        embedding_norm: add a norm after the embedding (Bloom).

    The others are those of ``LayersConfig``.
    """

    vocabulary: Length
    encoding: str = "rope"
    window: Count | Sequence[Count | None] | None = None
    tied: bool = True
    embedding_norm: bool = False


class Decoder(SavedModel[DecoderConfig]):
    """A causal language model: token embedding · √C, blocks, a norm, logits.

    Args:
        config: its shape.
        encodings: one encoding per layer, instead of those named by ``config.encoding``. Such a
            model cannot be saved.

    Raises:
        ArgumentError: if there is not one encoding per layer, or dimensions do not fit.

    >>> import torch
    >>> from posenc.models import Decoder, DecoderConfig
    >>> sizes = {"vocabulary": 256, "dim": 32, "layers": 2, "heads": 4}
    >>> model = Decoder(DecoderConfig(encoding="alibi", **sizes))
    >>> model(torch.randint(256, (1, 10))).shape
    torch.Size([1, 10, 256])
    """

    kind, made_from = "decoder", DecoderConfig

    def __init__(
        self, config: DecoderConfig, *, encodings: Sequence[Encoding] | None = None
    ) -> None:
        super().__init__(config, named=encodings is None)
        encodings = stack.make_encodings(
            config, config.encoding, config.options, encodings, layers=config.layers, causal=True
        )
        self.embedding = TokenEmbedding(config.vocabulary, config.dim)
        self.embedding_norm = stack.norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = stack.make_blocks(config, encodings, causal=True, window=config.window)
        self.shared_encodings = share_encodings(self)
        self.norm = stack.norm(config)
        self.output = None if config.tied else nn.Linear(config.dim, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights except the encodings'; see ``Blocks``."""
        stack.draw_embedding(self.embedding)
        self.blocks.reset_parameters()
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=self.config.dim**-0.5)

    @property
    def encodings(self) -> list[Encoding]:
        """The encoding of each layer."""
        return self.blocks.encodings

    def forward(
        self, tokens: TokenIds, layout: Layout | None = None, *, cache: Cache | None = None
    ) -> Float[Tensor, "B L V"]:
        """Logits of the next token at every position, ``[B, L, vocabulary]``.

        Args:
            tokens: ``[B, L]`` ids.
            layout: of the tokens; by default a sequence that continues the cache.
            cache: from ``new_cache``; extended in place.

        Raises:
            ArgumentError: for tokens of another rank or dtype, or no layout if the cache is not
                a plain sequence.
        """
        check("cache", Cache | None, cache, None)
        past = None if cache is None else cache[0]
        layout = stack.token_layout("tokens", tokens, layout, past)
        x = self.embedding(tokens) * self.config.embedding_factor
        x = self.blocks.embed(x, layout, tokens, past)
        if self.embedding_norm is not None:
            x = normalize(self.embedding_norm, x, layout)
        x = self.blocks(self.dropout(x), layout, cache=cache)
        x = normalize(self.norm, x, layout)
        if self.output is None:
            return tied_logits(self.embedding, x, self.config.vocabulary)
        logits: Tensor = self.output(x)
        return logits

    def new_cache(self) -> Cache:
        """An empty cache for ``forward``."""
        return Cache(self.config.layers)

    def select(self, rows: Int[Tensor, " rows"]) -> Decoder:
        """The model for the given batch rows: itself."""
        return self


def in_segments(
    model: Decoder,
    tokens: TokenIds,
    *,
    segment: int,
    memory: int,
    layout: Layout | None = None,
    cache: Cache | None = None,
) -> Iterator[Float[Tensor, "B S V"]]:
    """Logits of each segment in turn, with attention to ``memory`` tokens before it.

    The memory of a layer is its keys and values of the last ``memory`` tokens, with their layout:
    positions continue across segments. It receives no gradient.

    In evaluation, compared with one pass over the whole text:

    - a memory as long as the past gives equal results;
    - with a shorter memory M, a token attends in every layer to its segment so far and the M tokens
      before the segment, so layer n reaches ``n · M`` back. With segments of one token this is
      ``window=M + 1``;
    - a causal convolution (``conv``, ``path``) keeps the tokens it needs from before the memory;
    - absolute positions continue, up to the length of a learned table.

    In training, gradients end at the memory, and its keys come from earlier weights. The paper
    caches the layer's input and projects it again, with gradients to W_K and W_V.

    Args:
        model: any ``Decoder``.
        tokens: ``[B, L]`` ids.
        segment: tokens per segment; the last may be shorter.
        memory: tokens cached by each layer; 0: none.
        layout: of the tokens; by default they continue ``cache``.
        cache: from an earlier call; changed in place.

    Raises:
        ArgumentError: if ``segment`` is below 1 or ``memory`` below 0.
    """
    check("segment", Length, segment)
    check("memory", Natural, memory)
    state = cache or model.new_cache()

    def segments() -> Iterator[Tensor]:
        for begin in range(0, tokens.shape[1], segment):
            end = begin + segment
            part = None if layout is None else layout.slice(begin, end)
            logits = model(tokens[:, begin:end], part, cache=state)
            state.truncate(memory)
            yield logits

    return segments()
